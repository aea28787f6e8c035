"""The Celery task: one message in; a decision published, or a dead letter kept; then the ack."""

import json
import time
import traceback
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final

import structlog
from celery import Celery
from celery.exceptions import Reject

from worker.broker import TASK_NAME
from worker.dead_letter import Reason
from worker.decision import Decision
from worker.errors import InvalidTrace, Problem, ServiceUnavailable, TraceConflict
from worker.lifecycle import Lifecycle, Scorer
from worker.settings import WorkerSettings
from worker.trace import TRACE_ID_PREFIX, ReasoningTrace, decode_trace

_PAUSE_S: Final = 1.0

log = structlog.get_logger("worker.tasks")


def register(app: Celery, lifecycle: Lifecycle, settings: WorkerSettings) -> None:
    """Add ``score_trace`` to the app."""

    @app.task(name=TASK_NAME, bind=False, acks_late=True, ignore_result=True, typing=False)
    def score_trace(*args: Any, **kwargs: Any) -> dict[str, Any]:
        """Score one trace, given as the only argument: a JSON object.

        Returns the decision, or for a dead letter ``{"trace_id", "state": "dead", "reason", "detail"}``.
        """
        try:
            return _score(lifecycle.scorer, settings, args, kwargs)
        except ServiceUnavailable as error:
            log.warning("trace_given_back", detail=str(error))
            raise _given_back() from error
        except Exception as error:
            # Neither decided nor kept as a dead letter, so it must not be lost, whatever this is.
            log.error("trace_given_back", detail=type(error).__name__, where=_where(error))
            raise _given_back() from None


def _given_back() -> Reject:
    """What a task raises to return its message to the queue: late acks would acknowledge a task that merely failed."""
    # The queue gives it out again at once; without a pause an outage would spin.
    time.sleep(_PAUSE_S)
    return Reject("given back", requeue=True)


def _score(scorer: Scorer, settings: WorkerSettings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        payload = _only_argument(args, kwargs)
    except InvalidTrace as error:
        return _bury(scorer, {"args": args, "kwargs": kwargs}, "invalid", str(error))
    try:
        trace = decode_trace(payload, scorer.limits)
    except InvalidTrace as error:
        return _bury(scorer, payload, "invalid", str(error))
    with structlog.contextvars.bound_contextvars(trace_id=trace.id, domain=trace.metadata.task_domain):
        try:
            decision = _decide(scorer, trace, settings.decision_timeout_s)
        except TraceConflict as error:
            return _bury(scorer, payload, "conflict", str(error))
        except ServiceUnavailable:
            raise
        except Exception as error:
            # One trace that cannot be scored must neither stop the worker nor come back for ever. The error's own words
            # are not logged: they may quote the trace.
            log.error("scoring_failed", error=type(error).__name__, where=_where(error))
            return _bury(scorer, payload, "scoring_failed", type(error).__name__)
        scorer.publisher.publish(decision)
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


def _decide(scorer: Scorer, trace: ReasoningTrace, timeout_s: float) -> Decision:
    try:
        decided = scorer.batcher.submit(trace).result(timeout_s)
    except FutureTimeoutError:
        raise ServiceUnavailable(f"no decision within {timeout_s:g} s") from None
    if isinstance(decided, TraceConflict):
        raise decided
    return decided


def _only_argument(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and list(kwargs) == ["trace"]:
        return kwargs["trace"]
    raise InvalidTrace([Problem("$", "expected the trace as the only argument of score_trace")])


def _bury(scorer: Scorer, payload: Any, reason: Reason, detail: str) -> dict[str, Any]:
    """Keep a submission as a dead letter and tell whoever waits for its trace; the first decision of an id stands."""
    trace_id = _trace_id(payload)
    raw = json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")
    scorer.dead_letters.put(raw, reason, detail, trace_id)
    if trace_id and reason != "conflict":
        scorer.ledger.bury(trace_id, f"{reason}: {detail}")
    log.warning("trace_dead", trace_id=trace_id, reason=reason, detail=detail)
    return {"trace_id": trace_id, "state": "dead", "reason": reason, "detail": detail}


def _where(error: Exception) -> str:
    """Module and line that raised an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name} in {frame.filename}:{frame.lineno}"


def _trace_id(payload: Any) -> str:
    """The id of a submission that may be anything; empty unless it looks like one."""
    trace_id = payload.get("id") if isinstance(payload, dict) else None
    if isinstance(trace_id, str) and trace_id.startswith(TRACE_ID_PREFIX) and trace_id.isascii() and len(trace_id) <= 200:
        return trace_id
    return ""
