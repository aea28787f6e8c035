"""One message in hand, from its delivery until it is let go of."""

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from celery.worker.request import Request
from celery.worker.state import task_ready

from kp_scorer.decision import Decision
from kp_scorer.process.watchdog import StallTimer
from kp_scorer.spans import Recording, Step
from kp_scorer.trace import ReasoningTrace


class SubmissionRequest(Request):  # type: ignore[misc]  # celery ships no types
    """What Celery knows a submission by, and tells monitors of it."""

    def info(self, safe: bool = False) -> dict[str, Any]:
        """What monitors are shown: never the arguments, which are the trace."""
        shown: dict[str, Any] = super().info(safe=True)
        return shown


class Burial(NamedTuple):
    """How a message becomes a dead letter."""

    bury: Callable[[], Decision | None]
    """Keeps the letter; returns the decision on what the message says if there is one, and then nothing was kept."""
    result: dict[str, Any]
    """What a producer gets who asks for the result."""


class Delivery:
    """A message in hand, and what is still to be done with it. One thread at a time has to do with it.

    First its ``trace`` is to be decided, if the message is a submission. What comes of that, a ``burial`` or a
    ``decision``, is to be kept or to be published.
    """

    def __init__(self, message: Any, connection: int, request: SubmissionRequest | None = None) -> None:
        """Hold a kombu message, which came by the connection with this number; Celery may know it by a request."""
        self.message = message
        self.connection = connection
        self.trace: ReasoningTrace | None = None
        """What it submits."""
        self.burial: Burial | None = None
        self.decision: Decision | None = None
        self.is_hopeless = False
        """Whether it is to be given back as it is, because of an error that is nobody's but ours."""
        self.steps: list[Step] = []
        """What was done with its trace since it was last to be decided."""
        self.recording: Recording | None = None
        """What spans tell of it, once there is something to tell."""
        self.taken_at_s = time.time()
        """When it came, as Unix time."""
        self.since_s = time.monotonic()
        """When it came, by the monotonic clock."""
        self.still = StallTimer()
        """Since when nothing was done with it."""
        self.still.start()
        self.waits_for = ""
        """What was in the way when it was last tried."""
        self._request = request
        if request is not None:
            request.on_accepted(os.getpid(), self.since_s)

    @property
    def is_undecided(self) -> bool:
        """Whether what it says is still to be decided."""
        return self.burial is None and self.decision is None

    def held_s(self) -> float:
        """Seconds since it came."""
        return time.monotonic() - self.since_s

    def end(self) -> None:
        """Tell Celery that it has ended and is acknowledged."""
        if self._request is not None:
            self._request.acknowledged = True
            self._request.on_success((False, None, self.held_s()))

    def let_go(self) -> None:
        """Tell Celery that it is in hand no longer, and has not ended."""
        if self._request is not None:
            self._request.acknowledged = True
            task_ready(self._request)
            self._request.send_event("task-rejected", requeue=True)
