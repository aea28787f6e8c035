"""The object that travels the road from the consumer to the acknowledgement."""

import time
from typing import TYPE_CHECKING, Any

from kp_scorer.decider import PendingDecision
from kp_scorer.decision import Decision, Received
from kp_scorer.process.watchdog import StallTimer
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.trace import LateOutcome, ReasoningTrace

if TYPE_CHECKING:
    from kp_scorer.spans.recording import SpanRecording


class Delivery:
    """A message in flight and its progress. One thread at a time uses it.

    If the message is a submission, its ``trace`` is decided first. The resulting ``decision`` is then published, or the
    message is dead-lettered for the reason in ``dead_lettering``.
    """

    def __init__(self, message: Any, connection: int, queue: str = "") -> None:
        """Hold a kombu message that was received from a queue, on the connection of this number."""
        self.message = message
        self.connection = connection
        self.queue = queue
        self.turn = 0.0  # Its place among the deliveries of all queues, set at admission.
        self.received: Received | None = None  # The part that decisions and dead letters carry; None until the message is read.
        self.trace: ReasoningTrace | LateOutcome | None = None  # The submission; None until it is decoded.
        self.pending: PendingDecision  # The progress of deciding the trace, set by the look-up.
        # True if it is decided while no other is, because it failed before, or a worker that held it died.
        self.is_alone = False
        self.is_suspect = False  # True until it is read, if it may have ended earlier readers.
        self.dead_lettering: DeadLettering | None = None
        self.decision: Decision | None = None
        self.published_to: set[str] = set()  # The queues and streams that have its decision: a retry leaves them out.
        self.must_requeue = False  # True after an error of our own: the message goes back to its queue unchanged.
        self.recording: SpanRecording | None = None  # The recording of its spans, once it has begun.
        self.received_at_s = time.time()
        self._received_at = time.monotonic()
        self.stall = StallTimer()
        self.stall.start()
        self.waits_for = ""  # The error of the last attempt; empty before the first.

    @property
    def is_undecided(self) -> bool:
        """True if it is a submission whose trace is still to be decided, for the first time or again."""
        return self.trace is not None and self.dead_lettering is None and self.decision is None

    def in_flight_s(self) -> float:
        """Return the seconds since the message was received."""
        return time.monotonic() - self._received_at
