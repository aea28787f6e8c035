"""What spans tell of a message in hand: when it came, what was done with its trace, and how it ended. Never what it says."""

from collections.abc import Callable, Mapping

from kp_scorer.broker.task_message import deliveries_by
from kp_scorer.decision import Decision, Outcome
from kp_scorer.process.delivery import Burial, Delivery
from kp_scorer.process.observer import Ended
from kp_scorer.spans import TRACE_ID, Context, Destination, Recorder, Recording, context_in


class DeliverySpans:
    """Has a recorder told of each message that ends. Of what is given back there is nothing to tell: it comes again."""

    def __init__(
        self, recorder: Recorder, destinations: Mapping[Outcome, Destination], counted_as: Callable[[str], str]
    ) -> None:
        """Tell ``recorder``.

        Args:
            recorder: is told.
            destinations: where decisions of an outcome go, if anywhere.
            counted_as: by which name a domain is counted. Producers may write anything there.
        """
        self._recorder = recorder
        self._destinations = destinations
        self._counted_as = counted_as

    def publishing(self, delivery: Delivery, decision: Decision) -> Context:
        """A decision is about to be published; return the context that goes with it."""
        return self._of(delivery).publishing(self._destinations.get(decision.outcome))

    def published(self, delivery: Delivery, ended: Ended) -> None:
        """A decision is where its readers find it."""
        decision, queued_s, _ = ended
        said: dict[str, str | int | float] = {
            TRACE_ID: decision.trace_id,
            "kp_scorer.outcome": decision.outcome,
            "kp_scorer.score": decision.score,
            "kp_scorer.domain": self._counted_as(decision.domain),
            "kp_scorer.deliveries": deliveries_by(delivery.message),
        }
        if queued_s is not None:
            said["kp_scorer.queued_s"] = queued_s
        self._of(delivery).end(delivery.steps, said)

    def buried(self, delivery: Delivery, burial: Burial) -> None:
        """A dead letter is kept."""
        reason = burial.result["reason"]
        said = {
            TRACE_ID: burial.result["trace_id"],
            "kp_scorer.dead_letter.reason": reason,
            "kp_scorer.deliveries": deliveries_by(delivery.message),
        }
        self._of(delivery).end(delivery.steps, said, error=reason)

    def _of(self, delivery: Delivery) -> Recording:
        if delivery.recording is None:
            delivery.recording = self._recorder.begin(context_in(delivery.message.headers), delivery.taken_at_s)
        return delivery.recording
