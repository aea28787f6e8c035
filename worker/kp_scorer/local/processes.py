"""Starts and stops child processes, finds ports for them, and notes the signals that stop this process."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Final

_PORTS_TRIED: Final = 50
_PR_SET_PDEATHSIG: Final = 1
# Load the library at import: between fork and exec, hardly anything is safe.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


def stop(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Terminate processes, and kill those that have not ended after ``timeout_s``."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stopped_by_signals() -> Event:
    """Return an event that Ctrl-C and SIGTERM set from now on, in place of ending this process; a second one interrupts it.

    The first signal raises no exception, because Python would only print it if it arrived during a fork.
    """
    stopping = Event()

    def stop_or_interrupt(*_: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        # A shell makes background processes ignore Ctrl-C, which must not change here.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop_or_interrupt)
    return stopping


def free_ports(host: str, first: int, count: int) -> list[int]:
    """Return ``count`` ports from ``first`` on, preferably free ones; zeros, which mean no port, if ``first`` is 0."""
    if not first:
        return [0] * count
    following = range(first, first + count + _PORTS_TRIED)
    return [*(port for port in following if _is_free(host, port)), *following][:count]


def _is_free(host: str, port: int) -> bool:
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return True
    except (OSError, OverflowError):
        return False


def dying_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that has a child get this signal when its parent ends; None on systems other than Linux."""
    libc, parent = _LIBC, os.getpid()
    if libc is None:
        return None

    def request_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, number)
        # If the parent has ended before the request, no signal will come.
        if os.getppid() != parent:
            os._exit(1)

    return request_signal
