"""Connects the stages in the order of the road, and knows all messages that are on it."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kp_scorer.decider import Decider
from kp_scorer.errors import ScorerError
from kp_scorer.process.acknowledge import Acknowledger, AcknowledgeStage
from kp_scorer.process.admission import Admission
from kp_scorer.process.commit import CommitStage
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.embed import EmbedStage
from kp_scorer.process.look_up import LookUpStage
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.publish import PublishStage
from kp_scorer.reviser import Reviser


class Pipeline:
    """Completes each message: publishes its decision, or dead-letters or requeues it.

    Admission, look-up, embedding and commit decide it; then it is published and acknowledged. Each stage passes a delivery to
    the next. Those that fail go back to :class:`Admission`; no other stage has them decided again.
    """

    def __init__(
        self,
        decider: Decider,
        reviser: Reviser,
        publish_stage: PublishStage,
        acknowledger: Acknowledger,
        metrics: Metrics,
        *,
        group_size: int,
        weights: Mapping[str, int] = MappingProxyType({}),
        hold_s: float = math.inf,
        resend: Callable[[Delivery], None],
        on_fatal: Callable[[ScorerError], None],
    ) -> None:
        """Start the threads. ``weights`` is for :class:`Admission`; ``hold_s``, ``resend``, ``on_fatal`` for the last stage."""
        self._in_flight: set[Delivery] = set()
        metrics.in_flight.set_function(lambda: len(self._in_flight))
        self._completed = threading.Condition()
        self._acknowledge_stage = AcknowledgeStage(
            publish_stage,
            acknowledger,
            decide=self._decide,
            on_completed=self._remove,
            hold_s=hold_s,
            resend=resend,
            on_fatal=on_fatal,
        )
        self._admission = Admission(group_size, self._acknowledge_stage.put, weights)
        self.commit_stage = CommitStage(self._admission, decider, metrics)
        novelty, commit = decider.novelty, self.commit_stage.put
        self._embed_stage = EmbedStage(self._admission, decider, novelty, metrics, commit) if novelty else None
        look_up_stage = LookUpStage(self._admission, decider, reviser, metrics, (self._embed_stage or self.commit_stage).put)
        streams = self._embed_stage.threads if self._embed_stage else []
        self._deciding = [look_up_stage.thread, *streams, self.commit_stage.thread]
        # If any of these dies, messages stay in flight forever.
        self.threads = [*self._deciding, self._acknowledge_stage.thread]

    def put(self, delivery: Delivery, error: BaseException | None = None) -> None:
        """Accept a received message; ``error`` is an unexpected one that prevented reading it."""
        self._in_flight.add(delivery)
        if delivery.is_undecided:
            self._decide(delivery)
        else:
            self._acknowledge_stage.put([(delivery, error)])

    def deciding_stalled_s(self) -> float:
        """Return the longest time in seconds for which a deciding stage has been working on the same traces."""
        return max(thread.stall.elapsed_s() for thread in self._deciding)

    def delivery_stalled_s(self) -> float:
        """Return the longest time in seconds for which a message that is not being decided has made no progress."""
        # Copy the set, as other threads add and remove deliveries meanwhile.
        stalls = self._acknowledge_stage.thread.stall, *(delivery.stall for delivery in tuple(self._in_flight))
        return max(stall.elapsed_s() for stall in stalls)

    def waited_s(self) -> float:
        """Return for how long the oldest message whose last attempt failed has been in flight; 0 if there is none."""
        return max((each.in_flight_s() for each in tuple(self._in_flight) if each.waits_for), default=0.0)

    def drain(self) -> None:
        """Requeue the messages that wait for a retry, and from now on any that would have to wait."""
        self._acknowledge_stage.drain()

    def abort(self) -> None:
        """Requeue the messages whose traces no stage has begun to decide, too."""
        self._admission.is_aborted = True

    def wait_until_empty(self) -> None:
        """Wait until nothing is in flight."""
        with self._completed:
            self._completed.wait_for(lambda: not self._in_flight)

    def stop(self) -> None:
        """Stop gracefully: complete the messages in flight, then end the threads."""
        self.drain()
        # A waiting delivery may be decided once more before it ends.
        self.wait_until_empty()
        self._admission.stop()
        if self._embed_stage:
            self._embed_stage.stop()
        self.commit_stage.stop()
        self._acknowledge_stage.stop()
        for thread in self.threads:
            thread.join()

    def _decide(self, delivery: Delivery) -> None:
        # A delivery that waits for admission has not stalled as long as others are decided.
        delivery.stall.stop()
        self._admission.submit(delivery)

    def _remove(self, deliveries: Sequence[Delivery]) -> None:
        with self._completed:
            self._in_flight.difference_update(deliveries)
            self._completed.notify_all()
