"""Messages in flight, and which of their traces are being decided: some at a time, and one alone after a failure."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kp_scorer.decider import Case, Resolved
from kp_scorer.decision import Decision, Received
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.process.watchdog import StallTimer
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.trace import ReasoningTrace

if TYPE_CHECKING:
    from kp_scorer.spans.recording import SpanRecording


class Delivery:
    """A message in flight and its progress. One thread at a time uses it.

    If the message is a submission, its ``trace`` is decided first. The resulting ``decision`` is then published, or the
    message is dead-lettered for the reason in ``dead_lettering``.
    """

    def __init__(self, message: Any, connection: int) -> None:
        """Hold a kombu message, received on the connection with this number."""
        self.message = message
        self.connection = connection
        self.received: Received | None = None  # As decisions and dead letters name it; None until the message is read.
        self.trace: ReasoningTrace | None = None
        self.case: Case  # How far deciding the trace has come; there is none before it is looked up.
        self.is_alone = False  # Whether it is decided with nothing else in flight, as it failed, or its worker died, before.
        self.dead_lettering: DeadLettering | None = None
        self.decision: Decision | None = None
        self.published_to: set[str] = set()  # The queues and streams that have its decision: a retry leaves them out.
        self.must_requeue = False  # Whether it is to be requeued as it is, after an error of our own.
        self.recording: SpanRecording | None = None  # Its spans, once there is something to record.
        self.received_at_s = time.time()
        self._received_at = time.monotonic()
        self.stall = StallTimer()
        self.stall.start()
        self.waits_for = ""  # Why the last attempt failed; empty before the first.

    @property
    def is_undecided(self) -> bool:
        """Whether it is a submission whose trace is still to be decided."""
        return self.trace is not None and self.dead_lettering is None and self.decision is None

    def in_flight_s(self) -> float:
        """Seconds since it was received."""
        return time.monotonic() - self._received_at


class Admission:
    """Admits deliveries to the stages that decide, and gets them back: resolved, or to be decided again.

    Isolation: what fails together with others is decided again with nothing else in flight, so that a trace that causes a
    failure fails alone. An outage fails them together.

    At most two groups of ``group_size`` are being decided. If the worker dies, each of these traces counts an attempt, and is
    decided alone from then on.
    """

    def __init__(self, group_size: int, on_resolved: Callable[[Sequence[tuple[Delivery, Resolved | Exception]]], None]) -> None:
        """Call ``on_resolved``, which must neither raise nor wait, with what leaves."""
        self._group_size = group_size
        self._on_resolved = on_resolved
        self._changed = threading.Condition()
        self._waiting: deque[Delivery] = deque()
        self._alone: deque[Delivery] = deque()
        self._deciding = 0
        self._is_one_alone = False
        self._is_stopping = False
        self.is_aborted = False  # Set it, and nothing is begun any more.

    def submit(self, delivery: Delivery) -> None:
        """Have the trace of a message decided. Any thread may do so."""
        with self._changed:
            self._waiting.append(delivery)
            self._changed.notify()

    def next_group(self) -> Sequence[Delivery]:
        """Wait for what is to be decided next; empty once all are resolved and no more come."""
        with self._changed:
            # At the end, too, a trace that is being decided may have to be decided again.
            self._changed.wait_for(
                lambda: self._can_admit() or (self._is_stopping and not (self._waiting or self._alone or self._deciding))
            )
            if not self._can_admit():
                return ()
            self._is_one_alone = bool(self._alone)
            source, size = (self._alone, 1) if self._alone else (self._waiting, self._group_size)
            group = [source.popleft() for _ in range(min(size, len(source)))]
            for delivery in group:
                delivery.is_alone = self._is_one_alone
            self._deciding += len(group)
            return group

    def resolve(self, resolved: Sequence[tuple[Delivery, Resolved | Exception]]) -> None:
        """Pass on how some deliveries are resolved."""
        if resolved:
            self._leave(len(resolved))
            self._on_resolved(resolved)

    def fail(self, deliveries: Sequence[Delivery], error: Exception) -> None:
        """Decide again, alone, what failed; the error resolves what failed alone, and what failed by an outage or a setting."""
        if isinstance(error, ServiceUnavailable | SettingsError) or all(delivery.is_alone for delivery in deliveries):
            self.resolve([(delivery, error) for delivery in deliveries])
        else:
            self.decide_alone(deliveries)

    def decide_alone(self, deliveries: Sequence[Delivery]) -> None:
        """Decide these again, each with nothing else in flight."""
        with self._changed:
            self._alone.extend(deliveries)
        self._leave(len(deliveries))

    def raise_if_aborted(self) -> None:
        """Raise ServiceUnavailable, which requeues what a stage was about to begin, if the worker is about to end."""
        if self.is_aborted:
            raise ServiceUnavailable("worker: about to end")

    def stop(self) -> None:
        """Have ``next_group`` return nothing once what was submitted is resolved."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def _can_admit(self) -> bool:
        if self._alone:
            return not self._deciding
        return bool(self._waiting) and self._deciding <= self._group_size and not (self._is_one_alone and self._deciding)

    def _leave(self, count: int) -> None:
        with self._changed:
            self._deciding -= count
            self._changed.notify()
