"""The file in which a worker notes how it is, once a second."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from kp_scorer.health import Stall, State, make_private, remove, sweep, write

_EVERY_S: Final = 1.0

Stalls = Callable[[], Sequence[Stall]]
NotReady = Callable[[], Sequence[str]]

log = structlog.get_logger("kp_scorer.process.health_file")


@contextmanager
def health_file(directory: Path, stalls: Stalls, not_ready: NotReady) -> Iterator[None]:
    """Keep the process's file up to date while the context lasts; there is none afterwards.

    Args:
        directory: where it is; made if need be.
        stalls: for how long each part has stood still, and may.
        not_ready: why the worker takes no work; empty if it does.
    """
    ended = threading.Event()
    noting = threading.Thread(target=lambda: _note(directory, stalls, not_ready, ended), name="health file", daemon=True)
    noting.start()
    try:
        yield
    finally:
        ended.set()
        noting.join()
        remove(directory, os.getpid())


def _note(directory: Path, stalls: Stalls, not_ready: NotReady, ended: threading.Event) -> None:
    failed, swept = "", False
    while True:
        try:
            # Each time, as whoever clears away what is old of temporary files may take it.
            make_private(directory)
            if not swept:
                sweep(directory)
                swept = True
            write(directory, State(os.getpid(), time.monotonic(), tuple(stalls()), tuple(not_ready())))
            failed = ""
        except OSError as error:
            # The worker works all the same. Said once, not every second.
            failed, before = error.strerror or type(error).__name__, failed
            if failed != before:
                log.warning("health_not_noted", directory=str(directory), detail=failed)
        if ended.wait(_EVERY_S):
            return
