"""How a worker's resident memory stays flat: it returns what bursts and lost connections have taken."""

import ctypes
import gc
from typing import Final

_M_ARENA_MAX: Final = -8  # As in malloc.h of glibc; other C libraries have no arenas, and neither function.
_ARENAS: Final = 2

_libc = ctypes.CDLL(None)


def limit_malloc_arenas() -> None:
    """Have all threads of this process share two arenas of glibc's malloc, as ``MALLOC_ARENA_MAX=2`` does.

    By default nearly every thread has an arena of its own, and each arena keeps the pages of its largest burst.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, _ARENAS)


def collect_garbage() -> None:
    """Free what lost connections leave, and return free pages to the system: 1 to 3 ms.

    What a lost connection leaves refers to itself, and full collections are rare with most objects frozen: the heap would grow
    by what waits for one.
    """
    gc.collect()
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
