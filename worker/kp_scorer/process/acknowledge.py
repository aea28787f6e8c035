"""The last stage: it publishes or dead-letters resolved deliveries, acknowledges their messages, and retries failures."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import structlog

from kp_scorer.errors import EmbedderUnhealthy, ScorerError, ServiceUnavailable, SettingsError, WindowDiffers
from kp_scorer.logs import raised_at
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.publish import PublishStage
from kp_scorer.process.watchdog import StallTimer, VitalThread
from kp_scorer.reviser import Revised

RETRY_AFTER_S: Final = 1.0  # The backoff before every retry. It does not grow: a single retry covers all deliveries that wait.

log = structlog.get_logger("kp_scorer.process.acknowledge")

_Incoming = tuple[Delivery, Revised | BaseException | None]


class Acknowledger(Protocol):
    """The part of the consumer that acts on the messages it received. Any thread may call it."""

    def read(self, delivery: Delivery) -> None:
        """Read a delivery's message: set its trace, or the reason why it gets no decision."""

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages, except those whose connection is lost."""

    def requeue(self, delivery: Delivery) -> None:
        """Requeue a message. If its connection is lost, the broker has already done so."""

    def has_lost(self, delivery: Delivery) -> bool:
        """Return whether the message's connection is lost, so that the broker redelivers it."""


class AcknowledgeStage:
    """Completes each delivery: publishes its decision or stores its dead letter, and only then acknowledges its message.

    Backpressure: a delivery that fails in an outage stays in flight and is retried here. So the prefetch limit stops the broker
    from delivering more, and an outage does not raise the messages' counts of deliveries.
    """

    def __init__(
        self,
        publish_stage: PublishStage,
        acknowledger: Acknowledger,
        *,
        decide: Callable[[Delivery], None],
        on_completed: Callable[[Sequence[Delivery]], None],
        hold_s: float,
        resend: Callable[[Delivery], None],
        on_fatal: Callable[[ScorerError], None],
    ) -> None:
        """Start the thread.

        It calls ``decide`` with a delivery that is to be decided, or decided again, and ``on_completed`` with deliveries whose
        messages it has acknowledged or requeued. A delivery that keeps failing stays in flight for ``hold_s`` seconds; then
        ``resend`` puts it at the end of its queue. ``on_fatal`` is called with an error that every trace would meet in this
        process.
        """
        self._publish_stage = publish_stage
        self._acknowledger = acknowledger
        self._decide = decide
        self._on_completed = on_completed
        self._hold_s = hold_s
        self._resend = resend
        self._on_fatal = on_fatal
        self._incoming: SimpleQueue[Sequence[_Incoming] | None] = SimpleQueue()
        self._waiting: list[Delivery] = []
        self._retry_at = 0.0
        self._resend_from = 0.0
        self._draining = False
        self._stopped = False
        self.thread = VitalThread(self._run, "publisher")
        self.thread.start()

    def put(self, incoming: Sequence[_Incoming]) -> None:
        """Hand over deliveries to be completed. Any thread may call this.

        Each comes with the decision or error that resolves its trace, or with the error that prevented reading it, or with None
        if it is still to be dead-lettered, or to be read by this stage.
        """
        self._incoming.put(incoming)

    def drain(self) -> None:
        """Requeue the deliveries that wait for a retry, and from now on any that would have to wait."""
        self._draining = True
        self._incoming.put(None)

    def stop(self) -> None:
        """End the thread once its present work is done."""
        self._stopped = True
        self._incoming.put(None)

    def _run(self, stall: StallTimer) -> None:
        while not self._stopped:
            self._advance(self._next(), stall)

    def _next(self) -> Sequence[_Incoming]:
        """Wait for deliveries, or until those that wait are due for a retry; return both together."""
        due_s = max(0.0, self._retry_at - time.monotonic()) if self._waiting else None
        incoming: list[_Incoming] = []
        with suppress(Empty):
            incoming.extend(self._incoming.get(timeout=due_s) or ())
            # Deliveries that arrived meanwhile are published in the same round trip.
            while True:
                incoming.extend(self._incoming.get_nowait() or ())
        if self._draining or time.monotonic() >= self._retry_at:
            # Also retry deliveries that have not waited for the whole backoff: most wait for the same service.
            incoming.extend((delivery, None) for delivery in self._waiting)
            self._waiting.clear()
        return incoming

    def _advance(self, incoming: Sequence[_Incoming], stall: StallTimer) -> None:
        """Take each delivery to its next step."""
        # This must not be inlined into the loop: the loop's variables would keep the last error, and through its traceback all
        # deliveries that the error met, until the next one.
        stall.start()
        due = [delivery for delivery, resolved in incoming if self._is_due(delivery, resolved)]
        errors = self._publish_stage.complete(due)
        for delivery, error in errors.items():
            self._retry_later(delivery, error)
        self._acknowledge([delivery for delivery in due if delivery not in errors])
        stall.stop()

    def _is_due(self, delivery: Delivery, resolved: Revised | BaseException | None) -> bool:
        """Return whether a delivery is to be published or dead-lettered now; if not, take its next step instead."""
        if resolved is None and delivery.waits_for and self._requeue_or_resend(delivery):
            return False
        try:
            if resolved is not None:
                delivery.stall.start()
                self._publish_stage.resolve(delivery, resolved)
                return True
            if delivery.is_suspect:
                self._publish_stage.read(delivery, self._acknowledger.read)
        except BaseException as error:
            self._retry_later(delivery, error)
            return False
        if delivery.is_undecided:
            self._decide(delivery)
            return False
        return True

    def _requeue_or_resend(self, delivery: Delivery) -> bool:
        """Requeue or resend a delivery that has waited for too long; return False if it may be retried here."""
        if delivery.must_requeue or self._draining or self._acknowledger.has_lost(delivery):
            self._requeue(delivery)
            return True
        if delivery.in_flight_s() <= self._hold_s or time.monotonic() < self._resend_from:
            return False
        try:
            self._resend(delivery)
        except (ServiceUnavailable, SettingsError):
            # The message stays in flight and is retried. For a second no other is resent, as each would wait for the broker as
            # long as this one did.
            self._resend_from = time.monotonic() + RETRY_AFTER_S
            return False
        except Exception as error:
            self._retry_later(delivery, error)
            return True
        log.info("message_sent_again", held_s=round(delivery.in_flight_s()))
        self._acknowledge([delivery])
        return True

    def _retry_later(self, delivery: Delivery, error: BaseException) -> None:
        """Keep a delivery that failed for the next retry; requeue it if this worker is stopping."""
        if isinstance(error, EmbedderUnhealthy | WindowDiffers):
            self._on_fatal(error)
            self._requeue(delivery)
            return
        if not isinstance(error, ScorerError):
            # The message has neither a decision nor a dead letter, so it must not be lost. The broker redelivers a requeued
            # message at once: without the backoff this would spin.
            log.error("message_requeued", detail=type(error).__name__, where=raised_at(error))
            delivery.must_requeue = True
        waits_for = str(error) or type(error).__name__
        if waits_for != delivery.waits_for and not delivery.must_requeue:
            log.warning("trace_waits" if delivery.trace else "message_waits", detail=waits_for)
        delivery.waits_for = waits_for
        delivery.stall.start()
        if self._draining:
            self._requeue(delivery)
        else:
            if not self._waiting:
                self._retry_at = time.monotonic() + RETRY_AFTER_S
            self._waiting.append(delivery)

    def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        if deliveries:
            self._acknowledger.acknowledge(deliveries)
            self._on_completed(deliveries)

    def _requeue(self, delivery: Delivery) -> None:
        self._acknowledger.requeue(delivery)
        self._on_completed([delivery])
