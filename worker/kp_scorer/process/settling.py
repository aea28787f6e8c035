"""The last stage of every message: what was decided is published, what cannot be becomes a dead letter."""

from collections.abc import Sequence
from typing import Any

import structlog
from celery import Celery
from celery.states import SUCCESS

from kp_scorer.broker.results import Publisher
from kp_scorer.broker.task_message import deliveries_by, queued_s, result_id, submission_in
from kp_scorer.decider import Settled
from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits
from kp_scorer.errors import Reason, ServiceUnavailable, SettingsError, TraceConflict, TraceDead
from kp_scorer.logs import raised_at
from kp_scorer.process.delivery import Burial, Delivery
from kp_scorer.process.delivery_spans import DeliverySpans
from kp_scorer.process.observer import Ended, Observer
from kp_scorer.store import DeadLetters, Publication

log = structlog.get_logger("kp_scorer.process.settling")


class Settling:
    """Publishes and buries, whole batches at a time. One thread owns it."""

    def __init__(
        self,
        app: Celery,
        publisher: Publisher,
        dead_letters: DeadLetters,
        limits: Limits,
        observer: Observer,
        spans: DeliverySpans,
    ) -> None:
        """Publish by ``publisher``, keep ``dead_letters``, and what producers ask for in the app's result backend.

        Messages were taken within ``limits``. ``observer`` is told what is published, ``spans`` tell how each message ended.
        """
        self._app = app
        self._publisher = publisher
        self._dead_letters = dead_letters
        self._limits = limits
        self._observer = observer
        self._spans = spans

    def take(self, delivery: Delivery, settled: Settled | Exception) -> None:
        """Note what is to be done with a delivery, now that this has become of its trace.

        Raises:
            ServiceUnavailable: it is to be decided again, later.
            SettingsError: the same.
        """
        match settled:
            case Decision():
                delivery.decision = settled
            case TraceConflict():
                delivery.burial = self._burial(delivery, "conflict", str(settled))
            case TraceDead():
                # Also for one that is dead already: its letter has the same bytes, and only the times in it change.
                delivery.burial = self._burial(delivery, settled.reason, settled.detail)
            case ServiceUnavailable() | SettingsError():
                raise settled
            case Exception():
                # One trace that cannot be scored must neither stop the worker nor come back for ever. The error's message is
                # not logged: it may quote the trace.
                log.error("scoring_failed", **_named(delivery), error=type(settled).__name__, where=raised_at(settled))
                delivery.burial = self._burial(delivery, "scoring_failed", type(settled).__name__)

    def _burial(self, delivery: Delivery, reason: Reason, detail: str) -> Burial:
        assert delivery.trace, "only a submission is decided"
        trace_id, digest = delivery.trace.id, delivery.trace.digest()
        return burial_of(delivery.message, trace_id, reason, detail, self._dead_letters, self._limits, digest)

    def end(self, deliveries: Sequence[Delivery]) -> list[BaseException | None]:
        """Bury and publish what is due.

        Returns:
            For each delivery None if that is done, so that its message is to be acknowledged; or why it is not. After a
            ScorerError it is to be tried again.
        """
        errors: dict[Delivery, BaseException] = {}
        self._bury([delivery for delivery in deliveries if delivery.burial], errors)
        self._publish([delivery for delivery in deliveries if delivery.decision], errors)
        self._store_results([delivery for delivery in deliveries if delivery not in errors])
        return [errors.get(delivery) for delivery in deliveries]

    def _bury(self, deliveries: Sequence[Delivery], errors: dict[Delivery, BaseException]) -> None:
        away: ServiceUnavailable | None = None
        for delivery in deliveries:
            assert delivery.burial
            if away:
                # Each would wait for Redis as long as the first one did.
                errors[delivery] = away
                continue
            try:
                delivery.decision = delivery.burial.bury()
            except ServiceUnavailable as error:
                away = errors[delivery] = error
            except BaseException as error:
                # Not only an Exception: what a native library raises when it panics is none, and would end this thread.
                errors[delivery] = error
            else:
                if delivery.decision:
                    delivery.burial = None
                else:
                    self._spans.buried(delivery, delivery.burial)

    def _publish(self, deliveries: Sequence[Delivery], errors: dict[Delivery, BaseException]) -> None:
        decided = [(delivery, delivery.decision) for delivery in deliveries if delivery.decision]
        found: Sequence[BaseException | None]
        try:
            found = self._publisher.publish_all(
                [Publication(decision, self._spans.publishing(delivery, decision)) for delivery, decision in decided]
            )
        except BaseException as broken:
            # As when there is no memory for all of them at once.
            found = [broken] * len(decided)
        ended = []
        for (delivery, decision), error in zip(decided, found, strict=True):
            if error is not None:
                errors[delivery] = error
            else:
                held_s = delivery.held_s()
                _log(decision, held_s)
                ended.append(Ended(decision, queued_s(delivery.message, delivery.taken_at_s), held_s))
                self._spans.published(delivery, ended[-1])
        self._observer.published(ended)

    def _store_results(self, deliveries: Sequence[Delivery]) -> None:
        """Store what became of messages for those producers who ask for that, as far as it can be done.

        The decision is published, or the dead letter kept, whether or not.
        """
        for delivery in deliveries:
            if not (task_id := result_id(delivery.message)):
                continue
            result = delivery.burial.result if delivery.burial else {}
            if delivery.decision:
                result = delivery.decision.model_dump(mode="json")
            try:
                self._app.backend.store_result(task_id, result, SUCCESS)
            except Exception as error:
                log.warning("result_not_stored", detail=type(error).__name__)
                # Each of the others would wait for Redis as long as this one did.
                return


def burial_of(
    message: Any,
    trace_id: str,
    reason: Reason,
    detail: str,
    dead_letters: DeadLetters,
    limits: Limits,
    digest: bytes = b"",
) -> Burial:
    """How a submission becomes a dead letter; ``digest`` is that of the trace, if it is one."""

    def bury() -> Decision | None:
        payload = submission_in(message, limits)
        return dead_letters.bury(payload, reason, detail, trace_id, digest, deliveries_by(message))

    return Burial(bury, dead_result(trace_id, reason, detail))


def dead_result(trace_id: str, reason: Reason, detail: str) -> dict[str, Any]:
    """The result of a message that became a dead letter, for a producer who asks for it."""
    return {"trace_id": trace_id, "state": "dead", "reason": reason, "detail": detail}


def _named(delivery: Delivery) -> dict[str, str]:
    trace = delivery.trace
    return {"trace_id": trace.id, "domain": trace.metadata.task_domain} if trace else {}


def _log(decision: Decision, held_s: float) -> None:
    log.info(
        "trace_decided",
        trace_id=decision.trace_id,
        domain=decision.domain,
        outcome=decision.outcome,
        score=round(decision.score, 6),
        novelty_source=decision.novelty.source,
        embed_ms=decision.timings.embed_ms,
        batch_size=decision.timings.batch_size,
        duration_ms=round(held_s * 1_000, 1),
    )
