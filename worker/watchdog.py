"""Ends a process that has come to a standstill, so that its supervisor starts another and its messages come back."""

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

EXIT_CODE: Final = 4

_LOOK_EVERY_S: Final = 0.5

log = structlog.get_logger("worker.watchdog")


class Watchdog:
    """Watches what must move on: each is asked how many seconds it has stood still, and may stand still for so long."""

    def __init__(self) -> None:
        """Watch nothing yet; the thread ends with the process."""
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, name: str, still_s: Callable[[], float], limit_s: float) -> None:
        """End the process with exit code 4 if ``still_s`` ever gives more than ``limit_s`` seconds."""
        self._watched = {**self._watched, name: (still_s, limit_s)}

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            for name, (still_s, limit_s) in self._watched.items():
                if still_s() > limit_s:
                    log.critical("worker_stalled", stalled=name, limit_s=limit_s)
                    # Whatever stands still would also hold up an orderly end.
                    os._exit(EXIT_CODE)


class Stopwatch:
    """How long something has gone on, or since it was last heard of; 0 while it is not running. Safe between threads."""

    def __init__(self) -> None:
        """Not running."""
        self._since: float | None = None

    def start(self) -> None:
        """Run from 0."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Run no more."""
        self._since = None

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
