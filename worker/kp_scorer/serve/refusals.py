"""Answers requests that are refused. An answer names fields and sizes, never content."""

import re
from typing import Final

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from kp_scorer.errors import InvalidTrace, NotConverted, QueueFull, ScorerError, ServiceUnavailable, TraceConflict
from kp_scorer.logs import LogThrottle, raised_at
from kp_scorer.serve.exports import JSON, PROTOBUF, failure

_OTLP_PATH: Final = re.compile(r".*(/v1/(?:traces|logs|metrics))/*")
"""An exporter may add a prefix, as Langfuse's does, or a slash."""
_RETRY_AFTER: Final = {"Retry-After": "2"}
_MOST_PATH: Final = 100  # The most characters of a path in a line of the log.
_THROTTLE: Final = LogThrottle()

log = structlog.get_logger("kp_scorer.serve.refusals")


def refuse_in(app: FastAPI) -> None:
    """Make an application answer all errors of its handlers, and refuse requests whose length is ambiguous."""
    app.add_middleware(_RequestFilter)
    for kind in (HTTPException, RequestValidationError, InvalidTrace, NotConverted, TraceConflict, ServiceUnavailable):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(Exception, _refused)


class _RequestFilter:
    """Strips prefixes from OTLP's paths, and refuses requests with two lengths, whose connections it closes (RFC 9112).

    A proxy may go by one length and this server by the other, so that they disagree where the next request begins.
    """

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


async def _refused(request: Request, error: Exception) -> Response:
    """Return the answer to a refused request; it names fields and sizes, never content."""
    status, message, headers = 400, str(error), dict[str, str]()
    if isinstance(error, HTTPException):
        status, message, headers = error.status_code, error.detail, dict(error.headers or {})
    elif isinstance(error, ServiceUnavailable):
        # Log this rarely: exporters retry, and any peer can cause it.
        if _THROTTLE.admit(message):
            log.warning("request_put_off", detail=message)
        status = 429 if isinstance(error, QueueFull) else 503
        message, headers = "no room now, try again" if status == 429 else "not reachable now, try again", _RETRY_AFTER
    elif isinstance(error, RequestValidationError):
        status, message = 422, "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
    elif isinstance(error, TraceConflict):
        status = 409
    elif not isinstance(error, InvalidTrace | NotConverted):
        # The message of an error that is not ours may quote a trace.
        detail = {"detail": message} if isinstance(error, ScorerError) else {}
        log.error("request_failed", error=type(error).__name__, where=raised_at(error), **detail)
        status, message = 500, "an internal error, see the log"
    is_unknown = status == 404 and "route" not in request.scope
    is_export = _OTLP_PATH.fullmatch(request.url.path)
    # After these, exporters drop their spans, and many of them report it nowhere.
    is_lost = is_export and status in (400, 408, 413)
    if (status in (401, 415) or is_unknown or is_lost) and _THROTTLE.admit(
        (peer := request.client.host if request.client else "", status)
    ):
        log.warning("request_refused", status=status, peer=peer, path=request.url.path[:_MOST_PATH], detail=message)
    is_binary = is_export and request.headers.get("content-type") == PROTOBUF
    media_type = PROTOBUF if is_binary else JSON
    return Response(failure(media_type, message), status, headers, media_type)
