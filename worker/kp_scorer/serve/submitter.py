"""Turns spans into submissions: complete runs are converted, submitted under ids of their own, and only then removed.

A process that dies in between leaves a claim that expires. The process that claims the run next submits the same trace, which
is decided once.
"""

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, Final, Self

import structlog

from kp_scorer.adapters.attributes import SERVICE
from kp_scorer.bounded import BoundedProcess, Bounds
from kp_scorer.broker.calls import check_publishing
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.decoding import decode_for_sending
from kp_scorer.errors import (
    InvalidTrace,
    Problem,
    ProcessFailed,
    QueueFull,
    ScorerError,
    ServiceUnavailable,
    SettingsError,
    TraceConflict,
)
from kp_scorer.logs import LogThrottle, raised_at
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.serve.exports import MOST_LASTING_BYTES, MOST_OBJECTS
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.runs import MOST_VALUES, NO_WAIT, ClaimedRun, Ended, Recording

_EVERY_S: Final = 0.5
_DUE_EVERY_S: Final = 5.0
_SHOW_EVERY_S: Final = 5.0
_BACKOFF_S: Final = 2.0
_STALLED_S: Final = 120.0
_AWAY_S: Final = 10.0
# The largest runs that make traces take 3 s and 150 MB. A claim must outlast a conversion.
_CONVERTING_S: Final = 20.0
_CONVERTING_BYTES: Final = 402_653_184

log = structlog.get_logger("kp_scorer.serve.submitter")


class Submitter:
    """Submits complete runs, in a thread of its own. Leaving this context manager ends the thread between two runs."""

    def __init__(
        self, settings: Settings, store: Store, clients: Mapping[str, Client], metrics: ServeMetrics | None = None
    ) -> None:
        """Claim runs from ``store``, and submit each with the client of its queue, or else with that of the queue ""."""
        self._metrics = metrics or ServeMetrics()
        self._shown_at = -math.inf
        self._settings = settings
        self._store = store
        self._clients = clients
        supplied = settings.serve.model_dump_json(include={"confidence", "success"})
        arguments = supplied, settings.limits.model_dump_json(), str(MOST_VALUES)
        # The answer is JSON in ASCII, which may be six times as long as the trace.
        bounds = Bounds(30.0, _CONVERTING_S, _CONVERTING_BYTES, answer_bytes=8 * settings.limits.message_bytes)
        self._converting = BoundedProcess("kp_scorer.serve.run_converter", arguments, bounds)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="submitter", daemon=True)
        self._moved_at = time.monotonic()
        self._failing_since: float | None = None
        # The monotonic time at which each queue last refused a run.
        self._refused_at: dict[str, float] = {}
        self._throttle = LogThrottle()
        self._due_at, self._due = -math.inf, dict[tuple[str, str], list[str]]()
        # The time that each sender's runs have taken, so that all get the same.
        self._taken_s, self._least_s = defaultdict[str, float](float), 0.0

    def why_not_live(self) -> list[str]:
        """Return the reasons to restart this process; empty if there are none."""
        is_moving = self._thread.is_alive() and time.monotonic() - self._moved_at < _STALLED_S
        return [] if is_moving else ["the thread that submits runs has stalled"]

    def why_not_ready(self) -> list[str]:
        """Return the reasons to send requests to another process; empty if there are none."""
        away_s = time.monotonic() - since if (since := self._failing_since) else 0.0
        return [f"Redis or the broker has been away for {away_s:.0f} s"] if away_s > _AWAY_S else []

    def _repeat(self) -> None:
        pause_s = 0.0
        while not self._ending.wait(pause_s):
            pause_s = _BACKOFF_S
            self._moved_at = time.monotonic()
            run = None
            try:
                refused = self._refused_within(_BACKOFF_S)
                if run := self._store.runs.claim(refused, self._preferred(refused)):
                    try:
                        self._complete(run)
                    finally:
                        self._taken_s[run.sender] += time.monotonic() - self._moved_at
                if time.monotonic() - self._shown_at > _SHOW_EVERY_S:
                    self._metrics.show_held(*self._store.runs.held(), self._settings.serve)
                    self._shown_at = time.monotonic()
                pause_s = 0.0 if run else _EVERY_S
                if run or not self._refused_within(_AWAY_S):
                    self._failing_since = None
            except Exception as error:
                if run:
                    # Other queues need not wait.
                    pause_s, self._refused_at[run.queue] = 0.0, time.monotonic()
                if run and (isinstance(error, QueueFull) or self._reaches_other_queues()):
                    # Stay ready, because no other process can submit to this queue either. Requests must get their 429, and
                    # those of other queues' senders their answers.
                    self._failing_since = None
                else:
                    self._failing_since = self._failing_since or time.monotonic()
                if isinstance(error, ScorerError):
                    # The run will be claimed again.
                    log.warning("runs_wait", detail=str(error))
                else:
                    log.error("runs_wait", error=type(error).__name__, where=raised_at(error))

    def _reaches_other_queues(self) -> bool:
        """Return whether there are other queues, and the broker accepts messages, so that only one queue cannot be used."""
        is_up = False
        if len(self._clients) > 1 and not self._settings.broker.is_redis:
            with suppress(ServiceUnavailable), make_celery(self._settings) as app:
                check_publishing(app)
                is_up = True
        return is_up

    def _refused_within(self, limit_s: float) -> list[str]:
        """Return the queues of runs that could not be submitted in the last seconds."""
        return [queue for queue, refused_at in self._refused_at.items() if self._moved_at - refused_at < limit_s]

    def _preferred(self, refused: Sequence[str]) -> str:
        """Return a run of the sender whose runs have taken the least time, if there are several; empty if there is none.

        A long run takes seconds. In the order in which they are due, one sender's thousands would delay others' runs for hours.
        Senders whose queues have ``refused`` runs do not count: their runs would be preferred in vain.
        """
        if self._moved_at - self._due_at > _DUE_EVERY_S:
            self._due_at, self._due = self._moved_at, self._store.runs.due_by_sender()
            # A sender that had no runs has saved up no time meanwhile.
            self._taken_s |= {sender: max(self._taken_s[sender], self._least_s) for sender, _ in self._due}
        due = [(self._taken_s[sender], run_ids) for (sender, queue), run_ids in self._due.items() if queue not in refused]
        self._least_s, run_ids = min(filter(itemgetter(1), due), default=(self._least_s, []))
        return run_ids.pop(0) if run_ids else ""

    def _complete(self, run: ClaimedRun) -> None:
        try:
            answer = self._converted(run)
            if answer.get("is_open") and not run.has_waited:
                self._store.runs.wait(run, is_empty="left_out" in answer)
                return
            outcome = self._outcome(run, answer)
            if self._store.runs.close(run, answer.get("agent_span", ""), outcome):
                if outcome not in ("", NO_WAIT):
                    _apply_outcome(answer["trace"], json.loads(outcome))
                self._store.runs.finish(run.run_id, self._submit(run, answer))
        except (ServiceUnavailable, SettingsError):
            self._store.runs.release(run.run_id)
            raise
        except (TimeoutError, ProcessFailed) as error:
            # Let the claim expire, which counts as an attempt.
            detail = str(error) if isinstance(error, ProcessFailed) else f"it took longer than {_CONVERTING_S:g} s"
            log.warning("run_not_converted", otel_trace_id=run.run_id, detail=detail)

    def _outcome(self, run: ClaimedRun, answer: dict[str, Any]) -> str:
        """Return the late outcome, as JSON, of a run that does not state its success; empty if the run is to wait for one.

        Return ``NO_WAIT`` for a run that needs none.
        """
        assumed = answer["trace"]["metadata"].get("assumed", []) if "trace" in answer else []
        if run.closed or not self._settings.serve.outcome_wait_s or "success" not in assumed:
            # Every process that claims a closed run must submit the same trace as the one that closed it.
            return run.closed or NO_WAIT
        late = self._store.ledger.waiting_outcome(run.trace_id)
        return late.model_dump_json(include={"success", "confidence"}, exclude_none=True) if late else ""

    def _converted(self, run: ClaimedRun) -> dict[str, Any]:
        attempts, most = run.attempts - 1, self._settings.serve
        if attempts >= self._settings.worker.max_attempts:
            took = f"took longer than {_CONVERTING_S:g} s or more than {_CONVERTING_BYTES >> 20} MiB"
            return {"poison": f"$: the conversion was tried {attempts} times; each time it {took}, or ended its process"}
        if run.is_too_large:
            expected = f"expected spans that can be decoded, at most {most.run_spans} and {most.run_bytes} bytes"
            expected += f", and {SERVICE} and kp.* of resources in {MOST_LASTING_BYTES} bytes"
            expected += f", in exports of at most {MOST_OBJECTS} objects"
            return {"problems": [Problem("$", expected)]}
        answer: dict[str, Any] = self._converting.ask(run.export)
        return answer

    def _submit(self, run: ClaimedRun, answer: dict[str, Any]) -> Ended:
        """Submit a run, leave it out or dead-letter it; return how it ended."""
        if reason := answer.get("left_out"):
            self._metrics.runs_left_out.labels(reason).inc()
            if "detail" in answer and self._throttle.admit(answer["detail"]):
                log.warning("run_left_out", otel_trace_id=run.run_id, reason=reason, detail=answer["detail"])
            return "left_out"
        if "poison" in answer:
            self._store.dead_letters.dead_letter(run.export, DeadLettering("poison", answer["poison"], run.trace_id))
            return "dead"
        try:
            if "problems" in answer:
                raise InvalidTrace([Problem(*each) for each in answer["problems"]])
            if other := self._store.runs.recorded_before(run, Recording(*answer["recording"])):
                self._metrics.runs_left_out.labels("repeated").inc()
                detail = f"another instrumentation recorded this run as {other}, which was submitted"
                log.info("run_left_out", otel_trace_id=run.run_id, reason="repeated", detail=detail)
                return "left_out"
            trace: dict[str, Any] = answer["trace"]
            self._clients.get(run.queue, self._clients[""]).submit(trace)
            self._metrics.runs_submitted.inc()
            assumed = ", ".join(trace["metadata"].get("assumed", []))
            log.info("run_submitted", trace_id=trace["id"], spans=len(run.spans), **({"assumed": assumed} if assumed else {}))
            return "submitted"
        except TraceConflict as error:
            decoded, raw = decode_for_sending(trace, self._settings.limits)
            self._store.dead_letters.dead_letter(raw, DeadLettering("conflict", str(error), decoded.id, decoded.digest()))
        except InvalidTrace as error:
            self._store.dead_letters.dead_letter(run.export, DeadLettering("invalid", str(error), run.trace_id))
        return "dead"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(self._settings.worker.grace_s)
        self._converting.close()


def _apply_outcome(trace: dict[str, Any], outcome: dict[str, Any]) -> None:
    """Replace the assumed success and confidence of a trace with those of an outcome, and name what is still assumed."""
    assumed = [name for name in trace["metadata"].pop("assumed", []) if name not in outcome]
    trace["metadata"] |= {"success": outcome["success"]} | ({"assumed": assumed} if assumed else {})
    trace["outcome"]["confidence"] = outcome.get("confidence", trace["outcome"]["confidence"])
