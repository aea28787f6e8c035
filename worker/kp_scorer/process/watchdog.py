"""End a process that has stalled, so that its supervisor starts another and its messages are delivered again."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import structlog

from kp_scorer.health import Stall
from kp_scorer.logs import raised_at

EXIT_CODE: Final = 4

_LOOK_EVERY_S: Final = 0.5

log = structlog.get_logger("kp_scorer.process.watchdog")


class VitalThread(threading.Thread):
    """A daemon thread that the process is of no use without: the watchdog ends a process in which one has died."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        """Prepare to run ``target``; returning is its way to end."""
        super().__init__(target=target, name=name, daemon=True)
        self.has_died = False

    def run(self) -> None:
        """Run the target, and note it if an error ends that."""
        try:
            super().run()
        # Not only an Exception: what a native library raises when it panics is none, and it would end the thread all the same.
        except BaseException as error:
            # Its own words are not logged, as they may quote a trace.
            log.critical("thread_died", thread=self.name, error=type(error).__name__, where=raised_at(error))
            self.has_died = True


class Watchdog:
    """Watches parts that must make progress: each says for how many seconds it has stalled, and has a limit."""

    def __init__(self, when_well: Callable[[], None]) -> None:
        """Watch nothing yet; the thread ends with the process. ``when_well`` is called after each look that found all well."""
        self._when_well = when_well
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        self._threads: Sequence[VitalThread] = ()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, name: str, still_s: Callable[[], float], limit_s: float) -> None:
        """End the process with exit code 4 once ``still_s`` returns more than ``limit_s`` seconds."""
        self._watched = {**self._watched, name: (still_s, limit_s)}

    def watch_threads(self, threads: Sequence[VitalThread]) -> None:
        """End the process with exit code 4 if one of these ever dies. One that returns has not died."""
        self._threads = (*self._threads, *threads)

    def stalls(self) -> list[Stall]:
        """For how long each part has stalled by now."""
        return [Stall(name, still_s(), limit_s) for name, (still_s, limit_s) in self._watched.items()]

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            for thread in self._threads:
                if thread.has_died:
                    self._end(thread.name)
            for name, still_s, limit_s in self.stalls():
                if still_s > limit_s:
                    self._end(name, limit_s=limit_s)
            self._when_well()

    @staticmethod
    def _end(stalled: str, **fields: float) -> NoReturn:
        log.critical("worker_stalled", stalled=stalled, **fields)
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

    @property
    def is_running(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._since is not None

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since
