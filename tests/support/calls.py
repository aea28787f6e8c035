"""Counts of work and of memory. Unlike times, they are the same on every machine, however busy it is."""

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def calls_during(action: Callable[[], object]) -> int:
    """Count the Python functions that an action calls in this thread; a generator counts each time that it resumes."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return calls


class Memory:
    """The memory that Python allocated in a block; the figures are there once the block has ended."""

    held_bytes = peak_bytes = 0


@contextmanager
def traced_memory() -> Iterator[Memory]:
    memory = Memory()
    tracemalloc.start()
    try:
        yield memory
        memory.held_bytes, memory.peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
