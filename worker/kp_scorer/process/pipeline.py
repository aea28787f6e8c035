"""All messages in flight, on their way through the stages: look up and check, embed, decide, publish."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import structlog

from kp_scorer.decider import Decider, Resolved
from kp_scorer.errors import EmbedderUnhealthy, ScorerError, ServiceUnavailable, SettingsError, WindowDiffers
from kp_scorer.logs import raised_at
from kp_scorer.process.admission import Admission, Delivery
from kp_scorer.process.decide import DecideStage, EmbedStage, LookUpStage
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.publish import PublishStage
from kp_scorer.process.watchdog import StallTimer, VitalThread

RETRY_AFTER_S: Final = 1.0  # The backoff before every retry. It does not grow: a single retry covers all deliveries that wait.

log = structlog.get_logger("kp_scorer.process.pipeline")

_Incoming = tuple[Delivery, Resolved | BaseException | None]


class Acknowledger(Protocol):
    """The consumer, for the messages that it received. Any thread may call it."""

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages, except those whose connection is lost."""

    def requeue(self, delivery: Delivery) -> None:
        """Requeue a message. If its connection is lost, the broker has already done so."""

    def has_lost(self, delivery: Delivery) -> bool:
        """Whether the message's connection is lost, so that the broker redelivers it."""


class Pipeline:
    """Completes each message: publishes its decision, dead-letters it, or requeues it.

    At-least-once: a message is acknowledged only after its decision is published or its dead letter is stored.

    Backpressure: a message that cannot be completed during an outage stays in flight. So the prefetch limit stops the broker
    from delivering more, and the outage uses up no deliveries.
    """

    def __init__(
        self,
        decider: Decider,
        publish_stage: PublishStage,
        acknowledger: Acknowledger,
        metrics: Metrics,
        *,
        group_size: int,
        hold_s: float = math.inf,
        resend: Callable[[Delivery], None],
        on_fatal: Callable[[ScorerError], None],
    ) -> None:
        """Start the threads.

        A message that cannot be completed stays in flight for ``hold_s`` seconds; then ``resend`` puts it at the end of its
        queue. ``on_fatal`` is called with an error that every trace would meet in this process.
        """
        self._publish_stage = publish_stage
        self._acknowledger = acknowledger
        self._hold_s = hold_s
        self._resend = resend
        self._on_fatal = on_fatal
        self._in_flight: set[Delivery] = set()
        metrics.in_flight.set_function(lambda: len(self._in_flight))
        self._released = threading.Condition()
        self._incoming: SimpleQueue[Sequence[_Incoming] | None] = SimpleQueue()
        self._waiting: list[Delivery] = []
        self._retry_at = 0.0
        self._resend_from = 0.0
        self._draining = False
        self._stopped = False
        self._admission = Admission(group_size, self._incoming.put)
        self.decide_stage = DecideStage(self._admission, decider, metrics)
        novelty, ready = decider.novelty, self.decide_stage.put
        self._embed_stage = EmbedStage(self._admission, decider, novelty, metrics, ready) if novelty else None
        look_up_stage = LookUpStage(self._admission, decider, metrics, (self._embed_stage or self.decide_stage).put)
        streams = self._embed_stage.threads if self._embed_stage else []
        self._deciding = [look_up_stage.thread, *streams, self.decide_stage.thread]
        self._publisher = VitalThread(self._publish_all, "publisher")
        self._publisher.start()
        self.threads = [*self._deciding, self._publisher]  # If any of them dies, messages stay in flight for good.

    def put(self, delivery: Delivery, error: BaseException | None = None) -> None:
        """Accept a message that was received; ``error`` is one of our own that kept it from being read."""
        self._in_flight.add(delivery)
        if delivery.is_undecided:
            self._decide(delivery)
        else:
            self._incoming.put([(delivery, error)])

    def deciding_stalled_s(self) -> float:
        """Seconds that one of the stages that decide has been working on the same traces, the longest of them."""
        return max(thread.stall.elapsed_s() for thread in self._deciding)

    def delivery_stalled_s(self) -> float:
        """Seconds without progress of the message in flight that has made none for the longest.

        Those that are being decided do not count; see :meth:`deciding_stalled_s`.
        """
        # Copied, as other threads add and remove meanwhile.
        stalled_s = max((delivery.stall.elapsed_s() for delivery in tuple(self._in_flight)), default=0.0)
        return max(stalled_s, self._publisher.stall.elapsed_s())

    def drain(self) -> None:
        """Requeue what waits for a retry, and what would have to wait from now on."""
        self._draining = True
        self._incoming.put(None)

    def abort(self) -> None:
        """Also requeue what is not being decided yet."""
        self._admission.is_aborted = True

    def wait_until_empty(self) -> None:
        """Wait until nothing is in flight."""
        with self._released:
            self._released.wait_for(lambda: not self._in_flight)

    def stop(self) -> None:
        """Stop gracefully: complete what is in flight, then end the threads."""
        self.drain()
        # A delivery that waits may be decided once more before it ends.
        self.wait_until_empty()
        self._admission.stop()
        if self._embed_stage:
            self._embed_stage.stop()
        self.decide_stage.stop()
        self._stopped = True
        self._incoming.put(None)
        for thread in self.threads:
            thread.join()

    def _publish_all(self, stall: StallTimer) -> None:
        while not self._stopped:
            self._advance(self._next(), stall)

    def _advance(self, incoming: Sequence[_Incoming], stall: StallTimer) -> None:
        """Bring deliveries one step on."""
        # Not in the loop: its variables would keep the last error, and by its traceback all deliveries that it met, until the
        # next one.
        stall.start()
        due = [delivery for delivery, resolved in incoming if self._route(delivery, resolved)]
        errors = self._publish_stage.complete(due)
        for delivery, error in errors.items():
            self._retry_later(delivery, error)
        self._acknowledge([delivery for delivery in due if delivery not in errors])
        stall.stop()

    def _next(self) -> Sequence[_Incoming]:
        """Wait for deliveries, or until those that wait are due for a retry; those that are due come along with either."""
        due_s = max(0.0, self._retry_at - time.monotonic()) if self._waiting else None
        incoming: list[_Incoming] = []
        with suppress(Empty):
            incoming.extend(self._incoming.get(timeout=due_s) or ())
            # What arrived meanwhile is published in the same round trip.
            while True:
                incoming.extend(self._incoming.get_nowait() or ())
        if self._draining or time.monotonic() >= self._retry_at:
            # Also those that have not waited for the whole backoff: most wait for the same service.
            incoming.extend((delivery, None) for delivery in self._waiting)
            self._waiting.clear()
        return incoming

    def _route(self, delivery: Delivery, resolved: Resolved | BaseException | None) -> bool:
        """Do the next step of a delivery; return whether that is to publish or dead-letter it, which the caller does."""
        if resolved is not None:
            delivery.stall.start()
            try:
                self._publish_stage.resolve(delivery, resolved)
            except BaseException as error:
                self._retry_later(delivery, error)
                return False
            return True
        if delivery.waits_for and self._requeue_or_resend(delivery):
            return False
        if delivery.is_undecided:
            self._decide(delivery)
            return False
        return True

    def _decide(self, delivery: Delivery) -> None:
        # However long it waits to be admitted, it has not stalled as long as others are decided.
        delivery.stall.stop()
        self._admission.submit(delivery)

    def _requeue_or_resend(self, delivery: Delivery) -> bool:
        """Requeue or resend a delivery that has waited, if it must wait no longer; return whether it is dealt with."""
        if delivery.must_requeue or self._draining or self._acknowledger.has_lost(delivery):
            self._requeue(delivery)
            return True
        if delivery.in_flight_s() <= self._hold_s or time.monotonic() < self._resend_from:
            return False
        try:
            self._resend(delivery)
        except (ServiceUnavailable, SettingsError):
            # It is still in flight, and due again. The others would wait for the broker as long as this one did.
            self._resend_from = time.monotonic() + RETRY_AFTER_S
            return False
        except Exception as error:
            self._retry_later(delivery, error)
            return True
        log.info("message_sent_again", held_s=round(delivery.in_flight_s()))
        self._acknowledge([delivery])
        return True

    def _retry_later(self, delivery: Delivery, error: BaseException) -> None:
        """Have a delivery that failed with this error wait for the next retry, or requeue it if there will be none."""
        if isinstance(error, EmbedderUnhealthy | WindowDiffers):
            self._on_fatal(error)
            self._requeue(delivery)
            return
        if not isinstance(error, ScorerError):
            # It is neither decided nor a dead letter, so its message must not be lost. A requeued message is redelivered at
            # once: without the backoff this would spin.
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
            self._release(deliveries)

    def _requeue(self, delivery: Delivery) -> None:
        self._acknowledger.requeue(delivery)
        self._release([delivery])

    def _release(self, deliveries: Sequence[Delivery]) -> None:
        with self._released:
            self._in_flight.difference_update(deliveries)
            self._released.notify_all()
