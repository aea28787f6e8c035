"""The stage that publishes: decisions go to their queues and streams, and the rest to the dead letters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog
from celery import Celery
from celery.states import SUCCESS

from kp_scorer.broker.dead_queue import dead_letter, poison
from kp_scorer.broker.headers import deliveries_by, result_id
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.wire import raw_body
from kp_scorer.decision import Decision
from kp_scorer.errors import Reason, ServiceUnavailable, SettingsError, TraceConflict, TraceDead
from kp_scorer.logs import raised_at
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.metrics import Metrics
from kp_scorer.reviser import Revised
from kp_scorer.settings import Settings
from kp_scorer.spans.context import TRACE_ID, context_in
from kp_scorer.store.dead_letters import DeadLettering, DeadLetters
from kp_scorer.store.decision_stream import Publication
from kp_scorer.trace import ReasoningTrace

if TYPE_CHECKING:
    from kp_scorer.spans.recording import Recorder, SpanRecording

_DELIVERIES: Final = "kp_scorer.deliveries"

log = structlog.get_logger("kp_scorer.process.publish")


@dataclass
class PublishStage:
    """Publishes decisions and stores dead letters, whole batches at a time. One thread owns it."""

    app: Celery  # Its result backend stores the results that producers ask for.
    publisher: Publisher
    dead_letters: DeadLetters
    settings: Settings
    metrics: Metrics
    recorder: "Recorder | None" = None  # Records spans of messages that end here, not of requeued ones.

    def read(self, delivery: Delivery, read: Callable[[Delivery], None]) -> None:
        """Read a message that may have ended earlier readers, after noting the attempt; dead-letter it after too many attempts.

        Raises ServiceUnavailable if Redis cannot be reached, and any error that ``read`` raises.
        """
        body = raw_body(delivery.message)
        readers = self.dead_letters.begin_reading(body) - 1
        if readers < self.settings.worker.max_attempts:
            read(delivery)
            self.dead_letters.end_reading(body)
        else:
            delivery.dead_lettering = poison(delivery.message, readers)
        delivery.is_suspect = False

    def resolve(self, delivery: Delivery, resolved: Revised | BaseException) -> None:
        """Set the decision of a delivery, or the reason for its dead letter, by the result or error of deciding its trace.

        Raises ``resolved`` if it is ServiceUnavailable or SettingsError, so that the trace is decided again, or if it is an
        error of this package in reading the message.
        """
        match resolved:
            case Decision():
                delivery.decision = resolved
            case "waits":
                log.info("outcome_waits", outcome_id=delivery.trace and delivery.trace.id)
            case TraceConflict():
                delivery.dead_lettering = _dead_lettering(delivery, "conflict", str(resolved))
            case TraceDead():
                # If the trace was dead already, its dead letter keeps its bytes, and only its times change.
                delivery.dead_lettering = _dead_lettering(delivery, resolved.reason, resolved.detail)
            case Exception() if delivery.trace and not isinstance(resolved, ServiceUnavailable | SettingsError):
                # A trace that cannot be scored must neither stop the worker nor return forever. The error's message may quote
                # the trace, so it is not logged.
                trace, error = delivery.trace, type(resolved).__name__
                domain = trace.metadata.task_domain if isinstance(trace, ReasoningTrace) else None
                log.error("scoring_failed", trace_id=trace.id, domain=domain, error=error, where=raised_at(resolved))
                delivery.dead_lettering = _dead_lettering(delivery, "scoring_failed", error)
            case BaseException():
                raise resolved

    def complete(self, deliveries: Sequence[Delivery]) -> dict[Delivery, BaseException]:
        """Store dead letters and publish decisions, which a retry may repeat; return errors of those not to acknowledge."""
        errors: dict[Delivery, BaseException] = {}
        self._dead_letter(deliveries, errors)
        self._publish(deliveries, errors)
        self._store_results([delivery for delivery in deliveries if delivery not in errors])
        return errors

    def _dead_letter(self, deliveries: Sequence[Delivery], errors: dict[Delivery, BaseException]) -> None:
        outage: ServiceUnavailable | None = None
        for delivery, why in [(each, each.dead_lettering) for each in deliveries if each.dead_lettering]:
            if outage:
                # Each of the others would wait for Redis as long as the first did.
                errors[delivery] = outage
                continue
            try:
                limits = self.settings.limits
                delivery.decision = dead_letter(self.dead_letters, delivery.message, why, limits, delivery.received)
            except ServiceUnavailable as error:
                outage = errors[delivery] = error
            except BaseException as error:
                # A panic in a native library raises a BaseException, which would end this thread.
                errors[delivery] = error
            else:
                if delivery.decision:
                    delivery.dead_lettering = None
                elif recording := self._recording(delivery):
                    attributes = {TRACE_ID: why.trace_id, "kp_scorer.dead_letter.reason": why.reason}
                    recording.end(attributes | {_DELIVERIES: deliveries_by(delivery.message)}, why.reason)

    def _publish(self, deliveries: Sequence[Delivery], errors: dict[Delivery, BaseException]) -> None:
        decided = [(delivery, delivery.decision) for delivery in deliveries if delivery.decision]
        failures: Sequence[BaseException | None]
        try:
            failures = self.publisher.publish_all([self._publication(*each) for each in decided])
        except BaseException as broken:
            # The messages may not fit into memory together, for instance.
            failures = [broken] * len(decided)
        for (delivery, decision), error in zip(decided, failures, strict=True):
            if error is not None:
                errors[delivery] = error
            else:
                self._count_published(delivery, decision)

    def _count_published(self, delivery: Delivery, decision: Decision) -> None:
        in_flight_s = delivery.in_flight_s()
        received = delivery.received.model_dump() if delivery.received else {}
        waited_s = received["queued_ms"] / 1_000 if "queued_ms" in received else None
        if decision.revised_by:
            self.metrics.revisions.labels(decision.outcome).inc()
            received |= {"revision": decision.revision, "outcome_id": decision.revised_by.id}
        else:
            self.metrics.count_published(decision, delivery.queue, waited_s, in_flight_s)
        if self.settings.log.decisions in ("all", decision.outcome):
            log.info(
                "trace_revised" if decision.revised_by else "trace_decided",
                trace_id=decision.trace_id,
                domain=decision.domain,
                outcome=decision.outcome,
                score=round(decision.score, 6),
                novelty_source=decision.novelty.source,
                embed_ms=decision.timings.embed_ms,
                batch_size=decision.timings.batch_size,
                duration_ms=round(in_flight_s * 1_000, 1),
                **received,
            )
        if recording := self._recording(delivery):
            attributes = {
                TRACE_ID: decision.trace_id,
                "kp_scorer.outcome": decision.outcome,
                "kp_scorer.score": decision.score,
                # Producers may write anything as a domain, such as a secret or a new value in each trace.
                "kp_scorer.domain": self.metrics.counted_as(decision.domain),
                **{f"kp_scorer.{name}": value for name, value in decision.timings.model_dump().items()},
                **({} if waited_s is None else {"kp_scorer.queued_s": waited_s}),
                _DELIVERIES: deliveries_by(delivery.message),
            }
            recording.end(attributes)

    def _recording(self, delivery: Delivery) -> "SpanRecording | None":
        """Return the recording of a message's spans, which the first call begins; None if no spans are recorded."""
        if self.recorder and not delivery.recording:
            context = context_in(delivery.message.headers)
            delivery.recording = self.recorder.begin(context, delivery.received_at_s, delivery.queue)
        return delivery.recording

    def _publication(self, delivery: Delivery, decision: Decision) -> Publication:
        """Build the message of a decision, in the context of its publishing span if spans are recorded."""
        context = context_in(delivery.message.headers)
        if recording := self._recording(delivery):
            context = recording.publishing(self.publisher.destination(decision))
        # The message of a revision has no trace.
        message = None if decision.revised_by else delivery.message
        return self.publisher.publication(decision, context, message, delivery.published_to)

    def _store_results(self, deliveries: Sequence[Delivery]) -> None:
        """Store the results that producers ask for. A failure costs only these: decisions and dead letters are stored."""
        for delivery in deliveries:
            if not (task_id := result_id(delivery.message)):
                continue
            result: dict[str, Any] = {}
            if why := delivery.dead_lettering:
                result = {"trace_id": why.trace_id, "state": "dead", "reason": why.reason, "detail": why.detail}
            elif delivery.decision:
                result = delivery.decision.model_dump(mode="json")
            else:
                # There is no result yet: the late outcome waits for its trace to be decided, and is then sent again.
                continue
            try:
                self.app.backend.store_result(task_id, result, SUCCESS)
            except Exception as error:
                log.warning("result_not_stored", detail=type(error).__name__)
                if isinstance(error, self.app.backend.connection_errors):
                    # Each of the others would wait for Redis as long as this one did.
                    return


def _dead_lettering(delivery: Delivery, reason: Reason, detail: str) -> DeadLettering:
    assert delivery.trace, "only a submission is decided"
    return DeadLettering(reason, detail, delivery.trace.id, delivery.trace.digest(), deliveries_by(delivery.message))
