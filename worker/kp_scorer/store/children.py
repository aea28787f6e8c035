"""Processes that must not outlive the one that started them, however that ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
# Loaded here, as little is safe between fork and exec.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def dying_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What a child is to call before it begins (``preexec_fn``), to get this signal when the thread that started it is gone.

    None where only Linux could help; there a parent that is killed leaves its children behind.
    """
    libc, parent = _LIBC, os.getpid()
    if libc is None:
        return None

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        # It may be gone already, before the kernel was asked.
        if os.getppid() != parent:
            os._exit(1)

    return ask
