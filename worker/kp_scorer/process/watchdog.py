"""End a process that has stalled, so that its supervisor starts another and its messages are delivered again."""

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

EXIT_CODE: Final = 4

_LOOK_EVERY_S: Final = 0.5

log = structlog.get_logger("kp_scorer.process.watchdog")


class Watchdog:
    """Watches parts that must make progress: each says for how many seconds it has stalled, and has a limit."""

    def __init__(self) -> None:
        """Watch nothing yet; the thread ends with the process."""
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, name: str, still_s: Callable[[], float], limit_s: float) -> None:
        """End the process with exit code 4 once ``still_s`` returns more than ``limit_s`` seconds."""
        self._watched = {**self._watched, name: (still_s, limit_s)}

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            for name, (still_s, limit_s) in self._watched.items():
                if still_s() > limit_s:
                    log.critical("worker_stalled", stalled=name, limit_s=limit_s)
                    # An orderly end would wait for the part that has stalled.
                    os._exit(EXIT_CODE)


class StallTimer:
    """Seconds since something began, or was last reported; 0 while it is not running. Thread-safe."""

    def __init__(self) -> None:
        """Make a timer that is not running."""
        self._since: float | None = None

    def start(self) -> None:
        """Run from 0."""
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop, and return to 0."""
        self._since = None

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
