"""The Celery task: one message in; a decision published, or a dead letter kept; then the ack."""

import time
import traceback
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Final, cast

import structlog
from celery import Celery
from celery.exceptions import Reject

from worker.broker import DELIVERY_COUNT, TASK_NAME, deliveries
from worker.dead_letters import Reason
from worker.decision import Decision
from worker.errors import InvalidTrace, ServiceUnavailable, SettingsError, TraceConflict, TraceDead
from worker.lifecycle import Lifecycle, Scorer
from worker.settings import WorkerSettings
from worker.submission import as_bytes, only_argument, trace_id_of
from worker.trace import ReasoningTrace, decode_trace

_PAUSE_S: Final = 1.0
"""How long to wait before an outage is looked at again."""

log = structlog.get_logger("worker.tasks")


def register(app: Celery, lifecycle: Lifecycle, settings: WorkerSettings) -> None:
    """Add ``score_trace`` to the app."""

    # Celery prints each result for a line of its log, which it does not write, up to that many characters.
    @app.task(name=TASK_NAME, bind=True, acks_late=True, ignore_result=True, typing=False, resultrepr_maxsize=1)
    def score_trace(task: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Score one trace, given as the only argument: a JSON object.

        Returns the decision, or for a dead letter ``{"trace_id", "state": "dead", "reason", "detail"}``.
        """
        attempts = deliveries(task.request.get(DELIVERY_COUNT))
        told = ""
        while True:
            try:
                return _score(lifecycle.scorer, settings, args, kwargs, attempts)
            except (ServiceUnavailable, SettingsError) as error:
                # Held on to, so that no more than this is taken meanwhile, and no delivery is used up for the outage.
                if str(error) != told:
                    log.warning("trace_waits", detail=str(error))
                    told = str(error)
                if lifecycle.stopping.wait(_PAUSE_S):
                    raise Reject("given back", requeue=True) from error
            except Exception as error:
                # Neither decided nor kept as a dead letter, so it must not be lost, whatever this is.
                log.error("trace_given_back", detail=type(error).__name__, where=_where(error))
                # The queue gives it out again at once; without a pause this would spin.
                lifecycle.stopping.wait(_PAUSE_S)
                raise Reject("given back", requeue=True) from None


def _score(
    scorer: Scorer, settings: WorkerSettings, args: tuple[Any, ...], kwargs: dict[str, Any], attempts: int
) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        payload = only_argument(args, kwargs)
    except InvalidTrace as error:
        return _bury(scorer, {"args": args, "kwargs": kwargs}, "invalid", str(error), attempts)
    try:
        trace = decode_trace(payload, scorer.limits)
    except InvalidTrace as error:
        return _bury(scorer, payload, "invalid", str(error), attempts)
    with structlog.contextvars.bound_contextvars(trace_id=trace.id, domain=trace.metadata.task_domain):
        try:
            decision = _decide(scorer, trace, settings.decision_timeout_s)
        except TraceConflict as error:
            return _bury(scorer, payload, "conflict", str(error), attempts)
        except TraceDead as error:
            # Also what comes back of a trace that is dead already; burying it again changes nothing.
            reason, _, detail = error.reason.partition(": ")
            return _bury(scorer, payload, cast("Reason", reason), detail, attempts)
        except (ServiceUnavailable, SettingsError):
            raise
        except Exception as error:
            # One trace that cannot be scored must neither stop the worker nor come back for ever. The error's own words
            # are not logged: they may quote the trace.
            log.error("scoring_failed", error=type(error).__name__, where=_where(error))
            return _bury(scorer, payload, "scoring_failed", type(error).__name__, attempts)
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
    if isinstance(decided, Decision):
        return decided
    raise decided


def _bury(scorer: Scorer, payload: Any, reason: Reason, detail: str, attempts: int) -> dict[str, Any]:
    """Keep a submission as a dead letter and tell whoever waits for its trace; the first decision of an id stands."""
    trace_id = trace_id_of(payload)
    scorer.dead_letters.bury(as_bytes(payload), reason, detail, trace_id, attempts)
    return {"trace_id": trace_id, "state": "dead", "reason": reason, "detail": detail}


def _where(error: Exception) -> str:
    """Module and line that raised an error."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.name} in {frame.filename}:{frame.lineno}"
