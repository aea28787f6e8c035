"""The Celery task: one message in; a decision published, or a dead letter kept; then the ack."""

import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import structlog
from celery import Celery
from celery.exceptions import Reject
from celery.states import SUCCESS

from kp_scorer.broker.task_message import TASK_NAME, TaskMessage, as_bytes, only_argument, result_id, trace_id_of
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import EmbedderSick, InvalidTrace, Reason, ServiceUnavailable, SettingsError, TraceConflict, TraceDead
from kp_scorer.logs import raised_at
from kp_scorer.process.holding import PAUSE_S, Holding, SubmissionRequest
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.process.runtime import Runtime
from kp_scorer.settings import WorkerSettings
from kp_scorer.trace import ReasoningTrace

log = structlog.get_logger("kp_scorer.process.tasks")


def register(app: Celery, lifecycle: Lifecycle, settings: WorkerSettings) -> None:
    """Add ``score_trace`` to the app."""

    @app.task(name=TASK_NAME, bind=True, Request=SubmissionRequest, acks_late=True, ignore_result=True, typing=False)
    def score_trace(task: Any, *args: Any, **kwargs: Any) -> None:
        """Score one trace, given as the only argument: a JSON object.

        A producer who asks for the result gets the decision, or for a dead letter
        ``{"trace_id", "state": "dead", "reason", "detail"}``.
        """
        message: TaskMessage = task.request.message
        with Holding(lifecycle, message.sent, task.request.received_s, "trace_waits") as holding:
            result = _scored(lifecycle, settings, holding, args, kwargs, message.deliveries)
            store_result(task.app, message.sent, result)


def _scored(
    lifecycle: Lifecycle,
    settings: WorkerSettings,
    holding: Holding,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    deliveries: int,
) -> dict[str, Any]:
    """Score the trace among the arguments of the task, and wait as long as that takes."""
    while True:
        try:
            return _score(lifecycle.runtime, settings, args, kwargs, deliveries)
        except EmbedderSick as error:
            lifecycle.end(error)
            raise Reject("given back", requeue=True) from None
        except (ServiceUnavailable, SettingsError) as error:
            holding.wait(error)
        except Exception as error:
            # The trace is neither decided nor a dead letter, so its message must not be lost.
            log.error("trace_given_back", detail=type(error).__name__, where=raised_at(error))
            # The queue delivers it again at once; without a pause this would spin.
            lifecycle.stopping.wait(PAUSE_S)
            raise Reject("given back", requeue=True) from None


def store_result(app: Celery, message: Any, result: dict[str, Any]) -> None:
    """Store what became of a kombu message for its producer, if it asks for that and it can be done.

    The decision is published, or the dead letter kept, whether or not.
    """
    task_id = result_id(message)
    if not task_id:
        return
    try:
        app.backend.store_result(task_id, result, SUCCESS)
    except Exception as error:
        # Celery would take it for a failure of the task.
        log.warning("result_not_stored", detail=type(error).__name__)


def dead_result(trace_id: str, reason: Reason, detail: str) -> dict[str, Any]:
    """The result of a task that made a dead letter."""
    return {"trace_id": trace_id, "state": "dead", "reason": reason, "detail": detail}


def _score(
    runtime: Runtime, settings: WorkerSettings, args: tuple[Any, ...], kwargs: dict[str, Any], deliveries: int
) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        payload = only_argument(args, kwargs)
    except InvalidTrace as error:
        return _bury(runtime, {"args": args, "kwargs": kwargs}, "invalid", str(error), deliveries)
    try:
        trace = decode_trace(payload, runtime.limits)
    except InvalidTrace as error:
        return _bury(runtime, payload, "invalid", str(error), deliveries)
    with structlog.contextvars.bound_contextvars(trace_id=trace.id, domain=trace.metadata.task_domain):
        try:
            decision = _decide(runtime, trace, settings.decision_timeout_s)
        except TraceConflict as error:
            return _bury(runtime, payload, "conflict", str(error), deliveries, trace)
        except TraceDead as error:
            # Also raised for a trace that is dead already; burying it again changes nothing but times.
            return _bury(runtime, payload, error.reason, error.detail, deliveries, trace)
        except (ServiceUnavailable, SettingsError):
            raise
        except Exception as error:
            # One trace that cannot be scored must neither stop the worker nor come back for ever. The error's
            # message is not logged: it may quote the trace.
            log.error("scoring_failed", error=type(error).__name__, where=raised_at(error))
            return _bury(runtime, payload, "scoring_failed", type(error).__name__, deliveries, trace)
        runtime.publisher.publish(decision)
        log.info(
            "trace_decided",
            outcome=decision.outcome,
            score=round(decision.score, 6),
            novelty_source=decision.novelty.source,
            embed_ms=decision.timings.embed_ms,
            batch_size=decision.timings.batch_size,
            duration_ms=round((time.perf_counter() - started) * 1_000, 1),
        )
        return decision.model_dump(mode="json")


def _decide(runtime: Runtime, trace: ReasoningTrace, timeout_s: float) -> Decision:
    try:
        decided = runtime.batcher.submit(trace).result(timeout_s)
    except FutureTimeoutError:
        raise ServiceUnavailable(f"no decision within {timeout_s:g} s") from None
    if isinstance(decided, Decision):
        return decided
    raise decided


def _bury(
    runtime: Runtime, payload: Any, reason: Reason, detail: str, deliveries: int, trace: ReasoningTrace | None = None
) -> dict[str, Any]:
    """Keep a submission as a dead letter, unless it has been decided after all; ``trace`` is what it says, if it says one."""
    trace_id = trace_id_of(payload)
    digest = trace.digest() if trace else b""
    decision = runtime.store.dead_letters.bury(as_bytes(payload), reason, detail, trace_id, digest, deliveries)
    if decision is not None:
        runtime.publisher.publish(decision)
        return decision.model_dump(mode="json")
    return dead_result(trace_id, reason, detail)
