"""What a worker does again and again beside its messages, each in a thread of its own."""

import threading
import time
from collections.abc import Callable
from typing import Final, Self

import structlog

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.watchdog import VitalThread

_AFTER_ERROR_S: Final = 2.0

log = structlog.get_logger("kp_scorer.process.repeating")


class Repeating(VitalThread):
    """Does something every so many seconds until it is told to end, whatever comes of it."""

    def __init__(self, work: str, do: Callable[[], None], every_s: float) -> None:
        """Prepare to call ``do`` every ``every_s`` seconds, or a little later where it has failed."""
        super().__init__(self._repeat, work)
        self._work = work
        self._do = do
        self._every_s = every_s
        self._ended = threading.Event()
        self._done_at = time.monotonic()
        self.failure = ""
        """What was in the way when it was last done; empty if nothing was."""

    def since_done_s(self) -> float:
        """Seconds since it was last done, or since this was made."""
        return time.monotonic() - self._done_at

    def end(self) -> None:
        """Do it no more; what is being done now is finished."""
        self._ended.set()

    def _repeat(self) -> None:
        pause_s = self._every_s
        while not self._ended.wait(pause_s):
            pause_s = max(self._every_s, _AFTER_ERROR_S)
            try:
                self._do()
            except ServiceUnavailable as error:
                self.failure = str(error)
                log.warning("work_put_off", work=self._work, detail=self.failure)
            except Exception as error:
                self.failure = type(error).__name__
                log.error("work_put_off", work=self._work, detail=self.failure)
            else:
                pause_s, self.failure, self._done_at = self._every_s, "", time.monotonic()


class Chores:
    """All that is repeated, ended together. A context manager."""

    def __init__(self) -> None:
        """Begin with none."""
        self.threads: list[Repeating] = []

    def start(self, work: str, do: Callable[[], None], every_s: float) -> Repeating:
        """Repeat something from now on; see :class:`Repeating`."""
        repeating = Repeating(work, do, every_s)
        self.threads.append(repeating)
        repeating.start()
        return repeating

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # All are told before one is waited for, as each may be waiting for a server.
        for repeating in self.threads:
            repeating.end()
        for repeating in self.threads:
            repeating.join()
