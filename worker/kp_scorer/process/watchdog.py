"""End a process that has stalled, so that its supervisor starts another and its messages are delivered again."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import structlog

from kp_scorer.logs import raised_at

EXIT_CODE: Final = 4

_CHECK_EVERY_S: Final = 0.5

log = structlog.get_logger("kp_scorer.process.watchdog")


class VitalThread(threading.Thread):
    """A daemon thread that the process needs: the watchdog ends a process in which one has died."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        """Prepare to run ``target``; returning is its way to end."""
        super().__init__(target=target, name=name, daemon=True)
        self.has_died = False

    def run(self) -> None:
        """Run the target; record whether an error ends it."""
        try:
            super().run()
        # Not only an Exception: what a native library raises when it panics is none, and it would end the thread all the same.
        except BaseException as error:
            # The error's message is not logged: it may quote a trace.
            log.critical("thread_died", thread=self.name, error=type(error).__name__, where=raised_at(error))
            self.has_died = True


class Watchdog:
    """Watches parts that must make progress: each reports for how many seconds it has stalled, and has a limit."""

    def __init__(self, when_well: Callable[[], None]) -> None:
        """Watch nothing yet; the thread ends with the process. ``when_well`` is called after each check that passes."""
        self._when_well = when_well
        self._watched: dict[str, tuple[Callable[[], float], float]] = {}
        self._threads: Sequence[VitalThread] = ()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def watch(self, name: str, stalled_s: Callable[[], float], limit_s: float) -> None:
        """End the process with exit code 4 once ``stalled_s`` returns more than ``limit_s`` seconds."""
        self._watched = {**self._watched, name: (stalled_s, limit_s)}

    def watch_threads(self, threads: Sequence[VitalThread]) -> None:
        """End the process with exit code 4 if one of these ever dies. One that returns has not died."""
        self._threads = (*self._threads, *threads)

    def why_not_live(self) -> list[str]:
        """Why the process is to be restarted; empty if all parts make progress. One that waits for a server does."""
        died = [f"{thread.name}: the thread has died" for thread in self._threads if thread.has_died]
        return died + [f"{part}: stalled for {stalled_s:.0f} of {limit_s:g} s" for part, stalled_s, limit_s in self._stalls()]

    def _stalls(self) -> Iterator[tuple[str, float, float]]:
        """Each part that has stalled for longer than it may: its name, for how many seconds, and for how many it may."""
        for part, (elapsed_s, limit_s) in self._watched.items():
            if (stalled_s := elapsed_s()) > limit_s:
                yield part, stalled_s, limit_s

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_EVERY_S)
            for thread in self._threads:
                if thread.has_died:
                    _end_process(thread.name)
            for part, _, limit_s in self._stalls():
                _end_process(part, limit_s=limit_s)
            self._when_well()


def _end_process(stalled: str, **fields: float) -> None:
    log.critical("worker_stalled", stalled=stalled, **fields)
    # A graceful end would wait for the part that has stalled.
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
