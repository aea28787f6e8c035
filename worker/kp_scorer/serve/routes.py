"""Builds the ASGI application, with a handler for each path.

Handlers wait in the event loop, and do their work in threads.
"""

import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from typing import Annotated, Any, Final, Literal

import anyio.to_thread
import structlog
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from kp_scorer.client import Client, Submitted
from kp_scorer.decision import Decision
from kp_scorer.decoding import parse_json, parsed_or_refused
from kp_scorer.errors import InvalidTrace, QueueFull, Reason, ServiceUnavailable
from kp_scorer.kept import MOST_RUNS, KeptRuns, as_prompt
from kp_scorer.serve.answers import Answers
from kp_scorer.serve.bodies import Bodies
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.serve.exports import JSON, LOGS, PROTOBUF, SPANS, Signal, portions_of, spans_in, success
from kp_scorer.serve.refusals import refuse_in
from kp_scorer.serve.submitter import Submitter
from kp_scorer.serve.tokens import admits
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.records import TraceState
from kp_scorer.trace import is_submission_id, outcome_key

_MOST_VALUES: Final = 300_000
_MOST_TRACES: Final = 10_000
_JSON_LINES: Final = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
_REJECTED: Final = {
    "closed": "spans after their run was submitted or forgotten",
    "dead": "a run that is a dead letter: replay that",
    "too_large": "a run that is over the limits, or has a span or a resource that is, or that cannot be decoded",
}

log = structlog.get_logger("kp_scorer.serve.routes")


class SubmittedTrace(BaseModel):
    """The result of submitting one trace of a request."""

    number: int  # The trace's place in the request, from 1.
    state: Literal["pending", "invalid", "conflict"]
    trace_id: str | None = None
    outcome_key: str | None = None
    """The key that ``POST /traces/ID/outcome`` may need; None until a worker has started."""
    problems: list[dict[str, str]] = []


class TraceStatus(BaseModel):
    """The state of a trace, and its decision if it is decided."""

    trace_id: str
    state: TraceState
    decision: Decision | None = None
    reason: Reason | None = None
    detail: str | None = None


class _Handlers:
    def __init__(
        self, settings: Settings, store: Store, clients: Mapping[str, Client], tokens: Mapping[str, str], metrics: ServeMetrics
    ) -> None:
        self._metrics = metrics
        most_bytes = settings.serve.body_bytes
        self._bodies = Bodies(most_bytes, len(tokens))
        self.answers = Answers(len(tokens))
        self._keeps_source = settings.serve.keep_spans_s > 0
        self._store = store
        self._clients = clients
        self._tokens = tokens
        self._limits = settings.limits
        self._of_bodies = settings.limits.model_copy(update={"message_bytes": most_bytes, "values": _MOST_VALUES})
        # Parsed spans take thirty times the size of their Protobuf, so only one request of them is read at a time. Traces have
        # a limit of their own, so that a broker that hangs does not delay spans.
        self._of_spans, self._of_traces = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._kept = KeptRuns(settings.serve.kept, settings) if settings.serve.kept else None
        self._of_kept = anyio.CapacityLimiter(1)

    async def authorize(
        self, request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> AsyncIterator[None]:
        token = bearer.credentials if bearer else ""
        if not admits(self._tokens, token):
            raise HTTPException(401, "expected a bearer token that is known here", {"WWW-Authenticate": "Bearer"})
        request.state.token, request.state.queue = token if self._tokens else "", self._tokens.get(token, "")
        request.state.sender = sha256(token.encode()).hexdigest()[:16] if len(self._tokens) > 1 else ""
        with self._bodies.counted(request.state.token):
            yield

    async def export(self, request: Request) -> Response:
        """Store OpenTelemetry spans, in OTLP's Protobuf or JSON. All spans of a trace id are one run, and become one trace."""
        return await self._export(request, SPANS)

    async def export_logs(self, request: Request) -> Response:
        """Store the events of agents in OpenTelemetry's logs, with the spans that they belong to; drop other records."""
        return await self._export(request, LOGS)

    async def export_metrics(self, request: Request) -> Response:
        """Drop OpenTelemetry's metrics, so that an exporter that sends all of its signals here reports no errors."""
        media_type = _media_type(request, JSON, PROTOBUF)
        return Response(
            await self._bodies.work_on(request, self._of_spans, lambda _: success(media_type, 0, "")), media_type=media_type
        )

    async def _export(self, request: Request, signal: Signal) -> Response:
        media_type = _media_type(request, JSON, PROTOBUF)
        store = partial(self._store_spans, media_type, signal, request.state.queue, request.state.sender)
        return Response(await self._bodies.work_on(request, self._of_spans, store), media_type=media_type)

    def _store_spans(self, media_type: str, signal: Signal, queue: str, sender: str, body: bytes) -> bytes:
        by_run, rejected = spans_in(body, media_type, self._of_bodies, signal, keeps_source=self._keeps_source)
        reasons, rejected_runs = {"spans without ids"} if rejected else set(), list[str]()
        self._metrics.spans.labels("nameless").inc(rejected)
        by_portion = (self._store.runs.store_all(portion, queue, sender) for portion in portions_of(by_run))
        for (run_id, spans), (outcome, rejected_of_run) in zip(by_run.items(), chain.from_iterable(by_portion), strict=True):
            self._metrics.spans.labels(outcome).inc(rejected_of_run)
            self._metrics.spans.labels("stored").inc(len(spans) - rejected_of_run)
            if outcome == "full":
                # The exporter sends all spans again. Those that are already stored still count once.
                raise QueueFull("runs: no room until some are submitted")
            if rejected_of_run:
                rejected += rejected_of_run
                reasons.add(_REJECTED[outcome])
                rejected_runs.append(run_id)
        detail = "; ".join(sorted(reasons))
        if rejected_runs:
            # Log one line for a request: it may have thousands of runs.
            log.warning(
                "spans_rejected", otel_trace_id=rejected_runs[0], runs=len(rejected_runs), count=rejected, detail=detail
            )
        return success(media_type, rejected, detail)

    async def submit(self, request: Request) -> JSONResponse:
        """Submit a trace, a JSON array of traces, or JSON Lines.

        The status is 202 once the ledger and the broker have all of them, 207 if some are refused, and 422 if all are; their
        rows have the reasons.
        """
        media_type = _media_type(request, JSON, *_JSON_LINES)
        submit_all = partial(self._submit_all, media_type, request.state.token, request.state.queue)
        rows = await self._bodies.work_on(request, self._of_traces, submit_all)
        refused = sum(row.state != "pending" for row in rows)
        status = 202 if not refused else 422 if refused == len(rows) else 207
        return JSONResponse({"traces": [row.model_dump(exclude_defaults=True) for row in rows]}, status)

    def _submit_all(self, media_type: str, token: str, queue: str, body: bytes) -> list[SubmittedTrace]:
        self.answers.check_room(token)
        are_lines = media_type in _JSON_LINES
        if are_lines and body.count(b"\n") > _MOST_TRACES:
            raise HTTPException(413, f"expected at most {_MOST_TRACES} lines")
        lines = (parsed_or_refused(line, self._limits) for line in body.split(b"\n") if line.strip())
        document: Any = list(lines) if are_lines else parse_json(body, self._of_bodies)
        traces = document if isinstance(document, list) else [document]
        if len(traces) > _MOST_TRACES:
            raise HTTPException(413, f"expected at most {_MOST_TRACES} traces")
        answers = iter(self._clients[queue].submit_many(trace for trace in traces if not isinstance(trace, InvalidTrace)))
        results = (trace if isinstance(trace, InvalidTrace) else next(answers) for trace in traces)
        secret = ""
        with suppress(ServiceUnavailable):
            secret = self._store.ledger.outcome_secret()
        rows = [_row(number, result, secret) for number, result in enumerate(results, 1)]
        for state, count in Counter(row.state for row in rows).items():
            self._metrics.traces.labels(state).inc(count)
        return rows

    async def submit_outcome(self, trace_id: str, request: Request) -> JSONResponse:
        """Submit a late outcome of a trace, which is then decided again; the same outcome counts once.

        If there are several tokens, the request needs the trace's key, so that the holder of one token cannot speak for the
        others. The answer has the id of the outcome, under which its state can be read.
        """
        _media_type(request, JSON)
        submit = partial(self._submit_outcome, trace_id, request.state.queue)
        outcome_id = await self._bodies.work_on(request, self._of_traces, submit)
        return JSONResponse({"trace_id": trace_id, "outcome_id": outcome_id}, 202)

    def _submit_outcome(self, trace_id: str, queue: str, body: bytes) -> str:
        payload = parse_json(body, self._limits)
        if not isinstance(payload, dict):
            raise HTTPException(400, "expected a JSON object")
        key = outcome_key(self._store.ledger.outcome_secret(), trace_id)
        if len(self._tokens) > 1 and not admits([key], str(payload.get("key"))):
            raise HTTPException(403, "key: expected the outcome_key of the answer to the trace's submission")
        return self._clients[queue].submit({**payload, "@type": "LateOutcome", "trace_id": trace_id, "key": key})

    async def look_up(self, trace_id: str) -> TraceStatus:
        """Return the state of a trace, and its decision.

        A trace from spans has the id kp:trace:otel: with the spans' trace id.
        """
        is_id = is_submission_id(trace_id)
        (status,) = await anyio.to_thread.run_sync(self._clients[""].look_up, [trace_id]) if is_id else [None]
        if status is None:
            raise HTTPException(404, "no such trace: it was never submitted, has not arrived yet, or was forgotten")
        return TraceStatus(**{name: value for name, value in status._asdict().items() if value})

    async def similar(
        self,
        request: Request,
        task: Annotated[str, Query(min_length=1)],
        k: Annotated[int, Query(ge=1, le=MOST_RUNS)] = 5,
        format: Literal["json", "prompt"] = "json",  # noqa: A002 - the name of the parameter
        tokens: Annotated[int, Query(ge=1)] = 2_000,
    ) -> Response:
        """Return the kept runs that are most like a task, or a block of them for an agent's context."""
        if self._kept is None:
            raise HTTPException(404, "no kept runs here: set serve.kept")
        kept_runs = self._kept

        def answer() -> Response:
            self.answers.check_room(request.state.token)
            runs = kept_runs.similar(task, k)
            if format == "prompt":
                return Response(as_prompt(runs, tokens), media_type="text/plain")
            return JSONResponse({"runs": [run._asdict() for run in runs]})

        # Write the answer in a thread too: runs may be large, and writing them here would hold up all other requests.
        return await self._bodies.in_turn(request, self._of_kept, answer)


def make_app(
    settings: Settings,
    store: Store,
    clients: Mapping[str, Client],
    tokens: Mapping[str, str],
    submitter: Submitter,
    metrics: ServeMetrics,
) -> FastAPI:
    """Return the application, which uses a client for each queue; its OpenAPI is at ``/openapi.json``."""
    handlers = _Handlers(settings, store, clients, tokens, metrics)
    # FastAPI's pages of documentation would load scripts from other hosts. Its redirects, for paths that end with a slash,
    # would lead requests from a proxy that ends TLS to plain HTTP, with their tokens.
    app = FastAPI(title="kp-scorer", version=version("kp-scorer"), docs_url=None, redoc_url=None, redirect_slashes=False)
    guarded: dict[str, Any] = {"dependencies": [Depends(handlers.authorize)]}
    spans, traces = _takes({JSON: "object", PROTOBUF: "string"}), _takes({JSON: ["object", "array"], _JSON_LINES[0]: "string"})
    rows = dict[str, list[SubmittedTrace]]
    exports = {"traces": handlers.export, "logs": handlers.export_logs, "metrics": handlers.export_metrics}
    for signal, handler in exports.items():
        app.post(f"/v1/{signal}", openapi_extra=spans, **guarded)(handler)
    app.post("/traces", status_code=202, response_model=rows, openapi_extra=traces, **guarded)(handlers.submit)
    app.post("/traces/{trace_id:path}/outcome", status_code=202, openapi_extra=_takes({JSON: "object"}), **guarded)(
        handlers.submit_outcome
    )
    app.get("/traces/{trace_id:path}", response_model_exclude_unset=True, **guarded)(handlers.look_up)
    app.get("/similar", **guarded)(handlers.similar)

    async def probe(request: Request) -> JSONResponse:
        reasons = submitter.why_not_live() or (submitter.why_not_ready() if request.url.path == "/readyz" else [])
        return JSONResponse({"pid": os.getpid(), "reasons": reasons}, 503 if reasons else 200)

    for path in ("/livez", "/readyz"):
        app.get(path)(probe)
        # Some monitors probe by HEAD.
        app.head(path, include_in_schema=False)(probe)
    refuse_in(app)
    app.add_middleware(handlers.answers.bounded)
    return app


def _takes(types: Mapping[str, object]) -> dict[str, Any]:
    return {"requestBody": {"content": {media_type: {"schema": {"type": kind}} for media_type, kind in types.items()}}}


def _media_type(request: Request, *accepted: str) -> str:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Refuse other types: browsers let any site's pages send some of them without asking, even to a server that only this
    # machine can reach.
    if media_type not in accepted:
        raise HTTPException(415, f"expected Content-Type {' or '.join(accepted)}")
    return media_type


def _row(number: int, result: Submitted, secret: str) -> SubmittedTrace:
    if isinstance(result, str):
        # There is no secret until a worker has started.
        key = outcome_key(secret, result) if secret else None
        return SubmittedTrace(number=number, state="pending", trace_id=result, outcome_key=key)
    if isinstance(result, InvalidTrace):
        return SubmittedTrace(number=number, state="invalid", problems=[problem._asdict() for problem in result.problems])
    return SubmittedTrace(number=number, state="conflict", trace_id=result.trace_id)
