"""Keeps a worker's resident memory flat, by returning the memory that bursts and lost connections have taken."""

import ctypes
import gc
from typing import Final

_M_ARENA_MAX: Final = -8  # As in glibc's malloc.h; other C libraries have neither arenas nor these functions.
_ARENAS: Final = 2

_libc = ctypes.CDLL(None)


def limit_malloc_arenas() -> None:
    """Make all threads of this process share two arenas of glibc's malloc, as ``MALLOC_ARENA_MAX=2`` does."""
    # By default nearly every thread has an arena of its own, and each arena keeps the pages of its largest burst.
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def collect_garbage() -> None:
    """Free the objects of lost connections, and return free pages to the system; this takes 1 to 3 ms."""
    # These objects form cycles, and full collections are rare while most objects are frozen: until the next one the heap would
    # grow.
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
