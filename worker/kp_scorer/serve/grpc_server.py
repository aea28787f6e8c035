"""Serves OpenTelemetry's exports over gRPC, by passing each to the application that answers exports over HTTP.

https://opentelemetry.io/docs/specs/otlp/#otlpgrpc
"""

import asyncio
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTracePartialSuccess
from starlette.types import ASGIApp, Message

from kp_scorer.errors import QueueFull, SettingsError
from kp_scorer.serve.bodies import BODIES, REQUESTS, unpacked
from kp_scorer.serve.certificates import Renewal
from kp_scorer.serve.exports import PROTOBUF
from kp_scorer.settings.sections import ServeSettings

_OPTIONS: Final[Mapping[str, int]] = {
    # Otherwise a second process could share the port, and would get some of the connections.
    "grpc.so_reuseport": 0,
    "grpc.max_receive_message_length": ServeSettings.body_bytes,
    # Otherwise gRPC would unpack all of a message, however large it becomes, before it checks the size or we check the token.
    "grpc.per_message_decompression": 0,
    "grpc.max_concurrent_streams": 100,
    # Close the connections of peers that send nothing, or stop reading. Exporters connect again by themselves.
    "grpc.server_handshake_timeout_ms": 15_000,
    "grpc.max_connection_idle_ms": 15_000,
    "grpc.max_connection_age_ms": 60_000,
    "grpc.max_connection_age_grace_ms": 30_000,
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    # Otherwise gRPC lets a peer send mebibytes, instead of 64 KiB, before any of it is read.
    "grpc.http2.bdp_probe": 0,
}
_PACKED: Final = b"\x1f\x8b", b"x"  # Messages in gzip and deflate begin like this. No export does: 1 is its only field.
_CODES: Final = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}


async def start(settings: ServeSettings, app: ASGIApp, tokens: int, most_connections: int, most_requests: int) -> Any:
    """Start a server on ``serve.grpc_port``, and return it; the caller stops it.

    If there is more than one token, each may use half of the memory for messages. Raises SettingsError if the port cannot be
    used.
    """
    # gRPC logs errors with their messages, which may quote a trace.
    logging.getLogger("grpc").setLevel(logging.CRITICAL)
    options = {**_OPTIONS, "grpc.max_allowed_incoming_connections": most_connections}
    server = grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=most_requests)
    exports = _Exports(app, BODIES // 2 if tokens > 1 else BODIES)
    for signal in ("trace", "logs", "metrics"):
        # Register a stream of requests, although only one comes: otherwise gRPC reads it before the handler sees the token.
        method = grpc.stream_unary_rpc_method_handler(partial(exports.export, "traces" if signal == "trace" else signal))
        service = f"opentelemetry.proto.collector.{signal}.v1.{signal.title()}Service"
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Export": method})])
    address = f"[{settings.host}]:{settings.grpc_port}" if ":" in settings.host else f"{settings.host}:{settings.grpc_port}"
    try:
        if settings.certificate:
            server.add_secure_port(address, _credentials(settings))
        else:
            server.add_insecure_port(address)
    except RuntimeError:
        raise SettingsError(f"serve.grpc_port: cannot listen on {address}: set another port, or 0 for none") from None
    await server.start()
    return server


class _Exports:
    def __init__(self, app: ASGIApp, most_of_one: int) -> None:
        self._app = app
        self._open = Counter[str]()
        # gRPC reads a message as a whole, and nobody knows its size before, so each counts as one of the largest size.
        self._reading = asyncio.Semaphore(BODIES)
        self._reading_of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(most_of_one))

    async def export(self, signal: str, _: Any, context: Any) -> bytes:
        """Answer an export as the application does, or abort with the code for its status."""
        scope = _scope(signal, context)
        status, answered, body, is_read = 500, dict[bytes, bytes](), b"", False

        async def receive() -> Message:
            # The application calls this once it has admitted the token.
            nonlocal is_read
            if is_read:
                # gRPC cancels a request whose peer gives up.
                await asyncio.get_running_loop().create_future()
            message, is_read = await self._read(scope["state"]["token"], context), True
            if message is grpc.aio.EOF:
                return {"type": "http.disconnect"}
            if message.startswith(_PACKED):
                # The application answers the errors that this raises.
                message = unpacked(message, ServeSettings.body_bytes, zlib.MAX_WBITS + 32)
            return {"type": "http.request", "body": message}

        async def send(message: Message) -> None:
            nonlocal status, answered, body
            status = message.get("status", status)
            answered |= dict(message.get("headers", ()))
            body += message.get("body", b"")

        # Starlette raises an error again after it has answered it.
        with suppress(Exception):
            await self._app(scope, receive, send)
        if status != 200:
            await _abort(context, status, body, int(answered.get(b"retry-after", 0)))
        return body

    async def _read(self, token: str, context: Any) -> Any:
        # Unlike the application's count, this one includes requests whose answers a peer does not read.
        self._open[token] += 1
        context.add_done_callback(lambda _: self._open.subtract([token]))
        if self._open[token] > REQUESTS:
            raise QueueFull("serve: too many requests at once with this token")
        async with self._reading_of[token], self._reading:
            return await context.read()


def _scope(signal: str, context: Any) -> dict[str, Any]:
    """Return the scope of ASGI that describes an export as a request."""
    headers = [(b"content-type", PROTOBUF.encode())]
    for name, value in context.invocation_metadata():
        if name == "authorization":
            headers.append((b"authorization", value.encode()))
    # gRPC writes a peer as ipv4:127.0.0.1:50000 or ipv6:%5B::1%5D:50000.
    host = unquote(context.peer()).partition(":")[2].rpartition(":")[0].strip("[]")
    request = {"method": "POST", "scheme": "http", "path": f"/v1/{signal}", "query_string": b"", "client": (host, 0)}
    return {"type": "http", "http_version": "2", "headers": headers, "state": {}, **request}


async def _abort(context: Any, status: int, body: bytes, retry_after_s: int) -> None:
    code = _CODES.get(status, grpc.StatusCode.INVALID_ARGUMENT)
    # The body is a google.rpc.Status that lacks its code, field 1, and details, field 3.
    details = bytes([8, code.value[0]]) + body
    if retry_after_s:
        delay = bytes([10, 2, 8, retry_after_s])
        retry = AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=delay).SerializeToString()
        details += bytes([26, len(retry)]) + retry
    message = ExportTracePartialSuccess.FromString(body).error_message
    await context.abort(code, message, (("grpc-status-details-bin", details),))


def _credentials(settings: ServeSettings) -> Any:
    renewed: Any = None

    def load() -> None:
        nonlocal renewed
        pair = Path(settings.key).read_bytes(), Path(settings.certificate).read_bytes()
        renewed = grpc.ssl_server_certificate_configuration([pair])

    def if_renewed() -> Any:
        # Return a configuration only once after each renewal. If each handshake got one, gRPC would free that of another
        # handshake in progress, and crash.
        nonlocal renewed
        renewal.renew()
        configuration, renewed = renewed, None
        return configuration

    renewal = Renewal(settings, load)
    load()
    first, renewed = renewed, None
    return grpc.dynamic_ssl_server_credentials(first, if_renewed)
