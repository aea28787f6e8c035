"""Periodic tasks of a worker, beside its messages, each in a thread of its own."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import structlog

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.watchdog import StallTimer, VitalThread

_BACKOFF_S: Final = 2.0

log = structlog.get_logger("kp_scorer.process.periodic")


class PeriodicTask(VitalThread):
    """Calls a function every so many seconds; ``stall`` runs since a call last succeeded, or since this was made."""

    def __init__(self, work: str, do: Callable[[], None], every_s: float, ended: threading.Event) -> None:
        """Prepare to call ``do`` every ``every_s`` seconds, or at least 2 s after a failure, until ``ended`` is set."""
        super().__init__(self._repeat, work)
        self._do = do
        self._every_s = every_s
        self._ended = ended
        self.failure = ""  # Why the last call failed; empty if it did not.
        self.stall.start()

    def _repeat(self, stall: StallTimer) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            pause_s = max(self._every_s, _BACKOFF_S)
            try:
                self._do()
            except ServiceUnavailable as error:
                self.failure = str(error)
                log.warning("work_put_off", work=self.name, detail=self.failure)
            except Exception as error:
                self.failure = type(error).__name__
                log.error("work_put_off", work=self.name, detail=self.failure)
            else:
                pause_s, self.failure = self._every_s, ""
                stall.start()


class PeriodicTasks(AbstractContextManager["PeriodicTasks"]):
    """All periodic tasks. A context manager, which ends them together: a call in progress is finished, and none is started."""

    def __init__(self) -> None:
        self.threads: list[PeriodicTask] = []
        self._ended = threading.Event()

    def start(self, work: str, do: Callable[[], None], every_s: float) -> PeriodicTask:
        """Start a task; see :class:`PeriodicTask`."""
        task = PeriodicTask(work, do, every_s, self._ended)
        self.threads.append(task)
        task.start()
        return task

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for task in self.threads:
            task.join()
