"""The ASGI application: the input, the output and the tokens of each path.

Handlers wait in the event loop, and work in threads.
"""

import asyncio
import hmac
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from typing import Annotated, Any, Final, Literal, TypeVar

import anyio.to_thread
import structlog
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from kp_scorer.client import Client, Submitted
from kp_scorer.decision import Decision
from kp_scorer.decoding import parse_json, parsed_or_refused
from kp_scorer.errors import InvalidTrace, NotConverted, QueueFull, Reason, ServiceUnavailable, SettingsError, TraceConflict
from kp_scorer.files import check_writer, read_text
from kp_scorer.kept import MOST_RUNS, KeptRuns, as_prompt
from kp_scorer.logs import Seldom, raised_at
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.serve.submitter import JSON, LOGS, PROTOBUF, SPANS, Signal, Submitter, failure, spans_in, success
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.records import TraceState
from kp_scorer.trace import is_submission_id, outcome_key

_BODY_WITHIN_S: Final = 20.0
_RETRY_AFTER: Final = {"Retry-After": "2"}
_MOST_VALUES: Final = 300_000
_MOST_TRACES: Final = 10_000
BODIES: Final = 8  # The most bodies of the largest size that may be in memory at once; requests beyond them get 429.
REQUESTS: Final = 256  # The most requests of one token in progress at once: half of the connections that the server keeps.
_JSON_LINES: Final = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
_OTLP_PATH: Final = re.compile(r".*(/v1/(?:traces|logs|metrics))/*")
"""Exporters may add a prefix, as that of Langfuse does, or a slash."""
_REJECTED: Final = {
    "closed": "spans after their run was submitted or forgotten",
    "dead": "a run that is a dead letter: replay that",
    "too_large": "a run that is over the limits",
}
_MOST_TOKEN_BYTES: Final = 65_536
_MOST_PATH: Final = 100  # Characters of a path in a line of the log.
_SELDOM: Final = Seldom()
_TOKEN: Final = re.compile(r"([!-~]{16,512})(?:\s+(\S+))?")

log = structlog.get_logger("kp_scorer.serve.routes")

Result = TypeVar("Result")


class SubmittedTrace(BaseModel):
    """The outcome of one trace of a request."""

    number: int  # Its place in the request, from 1.
    state: Literal["pending", "invalid", "conflict"]
    trace_id: str | None = None
    outcome_key: str | None = None
    """For ``POST /traces/ID/outcome``."""
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
        self._most_bytes = settings.serve.body_bytes
        self._store = store
        self._clients = clients
        self._tokens = tokens
        self._limits = settings.limits
        self._of_bodies = settings.limits.model_copy(update={"message_bytes": self._most_bytes, "values": _MOST_VALUES})
        # Spans in Protobuf take thirty times their size, so only one request of them is read at a time. A broker that hangs
        # delays none.
        self._of_spans, self._of_traces = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self._kept, self._of_kept = (
            KeptRuns(settings.serve.kept, settings) if settings.serve.kept else None,
            anyio.CapacityLimiter(1),
        )
        # By token, so that none keeps the others out.
        self._bytes_in_memory, self._requests = Counter[str](), Counter[str]()
        self._most_of_one = BODIES * self._most_bytes // (2 if len(tokens) > 1 else 1)

    async def authorize(
        self, request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
    ) -> None:
        token = bearer.credentials if bearer else ""
        if not admits(self._tokens, token):
            raise HTTPException(401, "expected a bearer token that is known here", {"WWW-Authenticate": "Bearer"})
        request.state.token, request.state.queue = token if self._tokens else "", self._tokens.get(token, "")

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
            await self._work_on(request, self._of_spans, lambda _: success(media_type, 0, "")), media_type=media_type
        )

    async def _export(self, request: Request, signal: Signal) -> Response:
        media_type = _media_type(request, JSON, PROTOBUF)
        answer = await self._work_on(
            request, self._of_spans, partial(self._store_spans, media_type, signal, request.state.queue)
        )
        return Response(answer, media_type=media_type)

    def _store_spans(self, media_type: str, signal: Signal, queue: str, body: bytes) -> bytes:
        by_run, rejected = spans_in(body, media_type, self._of_bodies, signal)
        reasons = {"spans without ids"} if rejected else set()
        self._metrics.spans.labels("nameless").inc(rejected)
        for run_id, spans in by_run.items():
            outcome, rejected_of_run = self._store.runs.store(run_id, spans, queue)
            self._metrics.spans.labels(outcome).inc(rejected_of_run)
            self._metrics.spans.labels("stored").inc(len(spans) - rejected_of_run)
            if outcome == "full":
                # The spans that are stored by now count once, however often they are sent.
                raise QueueFull("runs: no room until some are submitted")
            if rejected_of_run:
                rejected += rejected_of_run
                reasons.add(_REJECTED[outcome])
                log.warning("spans_rejected", otel_trace_id=run_id, count=rejected_of_run, detail=_REJECTED[outcome])
        return success(media_type, rejected, "; ".join(sorted(reasons)))

    async def submit(self, request: Request) -> JSONResponse:
        """Submit a trace, a JSON array of traces, or JSON Lines.

        The status is 202 once the ledger and the broker have all of them, 207 if some are refused, and 422 if all are; their
        rows have the reasons.
        """
        media_type = _media_type(request, JSON, *_JSON_LINES)
        rows = await self._work_on(request, self._of_traces, partial(self._submit_all, media_type, request.state.queue))
        refused = sum(row.state != "pending" for row in rows)
        status = 202 if not refused else 422 if refused == len(rows) else 207
        return JSONResponse({"traces": [row.model_dump(exclude_defaults=True) for row in rows]}, status)

    def _submit_all(self, media_type: str, queue: str, body: bytes) -> list[SubmittedTrace]:
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
        """Submit what has become known of a trace's outcome, by which it is decided again, once.

        The trace's key is needed where there are several tokens: whoever has one of them must not speak for the others. The
        answer has the id of the outcome, under which its state can be read.
        """
        _media_type(request, JSON)
        submit = partial(self._submit_outcome, trace_id, request.state.queue)
        outcome_id = await self._work_on(request, self._of_traces, submit)
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
            raise HTTPException(404, "no such trace: never submitted, not yet, or forgotten")
        return TraceStatus(**{name: value for name, value in status._asdict().items() if value})

    async def similar(
        self,
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
            runs = kept_runs.similar(task, k)
            if format == "prompt":
                return Response(as_prompt(runs, tokens), media_type="text/plain")
            return JSONResponse({"runs": [run._asdict() for run in runs]})

        # Runs may be large, and writing them would hold up all other requests.
        return await anyio.to_thread.run_sync(answer, limiter=self._of_kept)

    async def _work_on(self, request: Request, limiter: anyio.CapacityLimiter, work: Callable[[bytes], Result]) -> Result:
        """Unpack a body while it arrives, within bounds of size and time, and work on it in a thread."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip"):
            raise HTTPException(415, "expected Content-Encoding gzip, or none")
        unpacking = zlib.decompressobj(wbits=31) if encoding == "gzip" else None
        token, most, received, body = request.state.token, self._most_bytes, 0, bytearray()
        self._requests[token] += 1
        try:
            if self._requests[token] > REQUESTS:
                raise QueueFull("serve: too many requests at once with this token")
            async with asyncio.timeout(_BODY_WITHIN_S):
                async for chunk in request.stream():
                    received += len(chunk)
                    unpacked = unpacking.decompress(chunk, most + 1 - len(body)) if unpacking else chunk
                    body += unpacked
                    self._bytes_in_memory[token] += len(unpacked)
                    if len(body) > most or received > most:
                        raise HTTPException(413, f"expected at most {most} bytes")
                    of_all = self._bytes_in_memory.total()
                    if self._bytes_in_memory[token] > self._most_of_one or of_all > BODIES * most:
                        raise QueueFull("serve: too many requests at once")
            if unpacking and (not unpacking.eof or unpacking.unused_data):
                raise HTTPException(400, "expected one whole gzip stream")
            return await anyio.to_thread.run_sync(work, bytes(body), limiter=limiter)
        except TimeoutError:
            raise HTTPException(408, f"expected the request within {_BODY_WITHIN_S:g} s") from None
        except (zlib.error, ClientDisconnect) as error:
            raise HTTPException(400, "expected gzip" if isinstance(error, zlib.error) else "disconnected") from None
        finally:
            self._requests[token] -= 1
            self._bytes_in_memory[token] -= len(body)


def make_app(
    settings: Settings,
    store: Store,
    clients: Mapping[str, Client],
    tokens: Mapping[str, str],
    submitter: Submitter,
    metrics: ServeMetrics,
) -> FastAPI:
    """Build the application, with a client of each queue; its OpenAPI is at ``/openapi.json``."""
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
    app.add_middleware(_OneLength)
    for kind in (HTTPException, RequestValidationError, InvalidTrace, NotConverted, TraceConflict, ServiceUnavailable):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(Exception, _refused)
    return app


class _OneLength:
    """Refuses requests with two lengths, as a proxy may believe the other one, and closes their connections (RFC 9112)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if path := _OTLP_PATH.fullmatch(scope.get("path", "")):
            scope["path"] = path[1]
        if {name for name, _ in scope["headers"]} >= {b"content-length", b"transfer-encoding"}:
            message = "expected Content-Length or Transfer-Encoding, not both"
            app = Response(failure(JSON, message), 400, {"Connection": "close"}, JSON)
        await app(scope, receive, send)


def _takes(types: Mapping[str, object]) -> dict[str, Any]:
    return {"requestBody": {"content": {media_type: {"schema": {"type": kind}} for media_type, kind in types.items()}}}


def _media_type(request: Request, *accepted: str) -> str:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Web pages of other sites may send other types without asking, even to a server that only this machine can reach.
    if media_type not in accepted:
        raise HTTPException(415, f"expected Content-Type {' or '.join(accepted)}")
    return media_type


def _row(number: int, result: Submitted, secret: str) -> SubmittedTrace:
    if isinstance(result, str):
        # Before the first worker there is no secret.
        key = outcome_key(secret, result) if secret else None
        return SubmittedTrace(number=number, state="pending", trace_id=result, outcome_key=key)
    if isinstance(result, InvalidTrace):
        return SubmittedTrace(number=number, state="invalid", problems=[problem._asdict() for problem in result.problems])
    return SubmittedTrace(number=number, state="conflict", trace_id=result.trace_id)


async def _refused(request: Request, error: Exception) -> Response:
    """Return the answer to a refused request; it names fields and sizes, never content."""
    status, message, headers = 400, str(error), dict[str, str]()
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, dict(error.headers or {})
    elif isinstance(error, ServiceUnavailable):
        # Exporters try again, and any peer may.
        if _SELDOM.is_due(message):
            log.warning("request_put_off", detail=message)
        status = 429 if isinstance(error, QueueFull) else 503
        message, headers = "no room now, try again" if status == 429 else "not reachable now, try again", _RETRY_AFTER
    elif isinstance(error, RequestValidationError):
        status, message = 422, "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
    elif isinstance(error, TraceConflict):
        status = 409
    elif not isinstance(error, InvalidTrace | NotConverted):
        # The message may quote a trace.
        log.error("request_failed", error=type(error).__name__, where=raised_at(error))
        status, message = 500, "an error of ours, see the log"
    is_unknown = status == 404 and "route" not in request.scope
    if (status in (401, 415) or is_unknown) and _SELDOM.is_due((peer := request.client.host if request.client else "", status)):
        log.warning("request_refused", status=status, peer=peer, path=request.url.path[:_MOST_PATH], detail=message)
    is_binary = _OTLP_PATH.fullmatch(request.url.path) and request.headers.get("content-type") == PROTOBUF
    media_type = PROTOBUF if is_binary else JSON
    return Response(failure(media_type, message), status, headers, media_type)


def read_tokens(file: str) -> dict[str, str]:
    """Read a file with a token on each line, and perhaps a queue behind it; lines that begin with # are comments.

    Return the queue of each token, empty for the first queue. Without a file there are no tokens.

    Raises SettingsError if it cannot be read, others may write to it, it has no token, or a line is no token.
    """
    try:
        if file:
            check_writer(file)
        lines = read_text(file, _MOST_TOKEN_BYTES).splitlines() if file else []
    except OSError as error:
        raise SettingsError(f"serve.tokens: {file}: {error.strerror}") from None
    rows = [_TOKEN.fullmatch(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    tokens = {row[1]: row[2] or "" for row in rows if row}
    if file and not (rows and all(rows)):
        message = "expected a token of 16 to 512 ASCII characters on each line, and perhaps a queue behind it"
        raise SettingsError(f"serve.tokens: {file}: {message}")
    return tokens


def admits(tokens: Collection[str], token: str) -> bool:
    """Return whether a request with this token, or an empty one, is admitted; without ``tokens`` every request is."""
    # Digests have one length, and all of them are compared, so the duration reveals nothing.
    own = sha256(token.encode("utf-8", "surrogatepass")).digest()
    matches = [hmac.compare_digest(own, sha256(each.encode()).digest()) for each in tokens]
    return any(matches) or not matches
