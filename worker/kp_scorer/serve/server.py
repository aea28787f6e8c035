"""Runs the serving process: its sockets, its TLS, its limits on peers, and the shutdown after SIGTERM."""

import asyncio
import logging
import os
import resource
import signal
import socket
from asyncio import Transport
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.logs import count_dropped_lines
from kp_scorer.monitoring import http_server
from kp_scorer.serve.certificates import Expiry, Renewal, check_certificate
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.serve.routes import make_app
from kp_scorer.serve.submitter import Submitter
from kp_scorer.serve.tokens import read_tokens
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import ServeSettings
from kp_scorer.store import Store

_REQUEST_WITHIN_S: Final = 15.0  # A connection that does not send all headers of a request within this time is closed.
_HEADER_BYTES: Final = 16_384
_MOST_CHUNKS: Final = 1_000  # The most chunks of a body whose chunks have on average less than ``_LEAST_CHUNK_BYTES``.
_LEAST_CHUNK_BYTES: Final = 64
_MOST_CONNECTIONS: Final = 512  # The most connections of each port.
_MOST_HANDSHAKES: Final = 128
_MOST_WAITING: Final = 256  # The most connections that wait to be accepted.
# A request counts until it is answered, even if its connection is closed. Requests beyond this number get 503.
_MOST_REQUESTS: Final = 1_024

log = structlog.get_logger("kp_scorer.serve.server")


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer the requests in progress.

    Raises SettingsError if the tokens, the certificate or the port cannot be used.
    """
    tokens = read_tokens(settings.serve.tokens)
    check_certificate(settings.serve)
    most_connections = _connections_within_limit()
    listener = _listener(settings.serve, most_connections)
    # Make asyncio's buffers as small as the largest record of TLS. By default they take 256 kB for each connection, also for a
    # closed one until it is collected.
    SSLProtocol.max_size = 16_384
    # By default, uvicorn logs events that any peer can cause, and the messages of errors, which may quote a trace.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    metrics = ServeMetrics()
    count_dropped_lines(metrics.log_lines_dropped.inc)
    with ExitStack() as opened:
        opened.enter_context(listener)
        store = opened.enter_context(Store.open(settings))
        store.dead_letters.on_stored = metrics.count_dead_letter
        clients = {queue: opened.enter_context(Client(settings, queue=queue)) for queue in {"", *tokens.values()}}
        submitter = opened.enter_context(Submitter(settings, store, clients, metrics))
        metrics.ready.set_function(lambda: not (submitter.why_not_live() or submitter.why_not_ready()))
        metrics.certificate_expiry.set_function(Expiry(settings.serve).time_s)
        reasons = submitter.why_not_live, submitter.why_not_ready
        opened.enter_context(http_server(settings.metrics.of_serve(), metrics.registry, *reasons))
        app = metrics.measured(make_app(settings, store, clients, tokens, submitter, metrics))
        config = _config(settings, app, listener)
        if settings.serve.certificate:
            listener.before_accept = Renewal(settings.serve, partial(_load_certificate, config)).renew
        server = _Server(config, settings.serve, len(tokens), most_connections)
        # Handle a signal that comes before uvicorn runs, and the one that uvicorn raises again after its shutdown.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        server.run(sockets=[listener])
    log.info("serve_stopped")


def _connections_within_limit() -> int:
    """Raise the limit on open files as far as connections need it and the system allows; return how many each port may have.

    The other files are for handshakes and Redis. Without any left, the server answers nobody, and asyncio logs that all the
    time.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(4 * _MOST_CONNECTIONS, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return min(_MOST_CONNECTIONS, files // 4)


class _Server(uvicorn.Server):
    """Serves gRPC in the same loop as HTTP, from the start until the requests in progress are answered."""

    def __init__(self, config: uvicorn.Config, settings: ServeSettings, tokens: int, most_connections: int) -> None:
        super().__init__(config)
        self._settings, self._tokens, self._most_connections = settings, tokens, most_connections
        self._grpc: Any = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        settings = self._settings
        if settings.grpc_port:
            # gRPC reads this variable once, on import. By default it logs what any peer can cause.
            os.environ["GRPC_VERBOSITY"] = "NONE"
            try:
                # Import gRPC only here: it takes 8 MB, and while it is switched off, none of its code should run.
                from kp_scorer.serve import grpc_server
            except ModuleNotFoundError as error:
                raise SettingsError(
                    f"serve.grpc_port: there is no {error.name}: install kp-scorer[serve], or set 0 for none"
                ) from None
            limits = self._most_connections, _MOST_REQUESTS
            self._grpc = await grpc_server.start(settings, self.config.loaded_app, self._tokens, *limits)
        await super().startup(sockets)
        port = sockets[0].getsockname()[1] if sockets else settings.port
        grpc_port = settings.grpc_port or None
        about_ports = {"tls": bool(settings.certificate), "connections": self._most_connections}
        log.info("serve_ready", host=settings.host, port=port, grpc_port=grpc_port, **about_ports)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        draining = asyncio.create_task(self._grpc.stop(self.config.timeout_graceful_shutdown)) if self._grpc else None
        await super().shutdown(sockets)
        if draining:
            if self.force_exit:
                await self._grpc.stop(None)
            await draining


def _config(settings: Settings, app: Any, listener: "_Listener") -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(_Protocol, listener),  # type: ignore[arg-type]  # uvicorn only calls it
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        # Asyncio accepts so many connections at a time, about three times before the server closes those over its limit.
        backlog=max(1, min(64, listener.most_connections // 4)),
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=int(settings.worker.grace_s),
        ssl_certfile=settings.serve.certificate or None,
        ssl_keyfile=settings.serve.key or None,
    )


class _Listener(socket.socket):
    """A listening socket that closes the oldest of too many connections in TLS's handshake.

    Asyncio would wait a minute for each of them.
    """

    def __init__(self, fileno: int, most_connections: int) -> None:
        super().__init__(fileno=fileno)
        self.most_connections = most_connections
        self.handshakes: dict[Any, socket.socket] = {}  # The connections in the handshake, by the address of the peer.
        self.before_accept: Callable[[], None] = lambda: None

    def listen(self, backlog: int = 0) -> None:
        """Let connections wait, however few asyncio accepts at a time: a peer that finds no room tries again after a second."""
        super().listen(_MOST_WAITING)

    def accept(self) -> tuple[socket.socket, Any]:
        self.before_accept()
        connection, peer = super().accept()
        self.handshakes[peer] = connection
        if len(self.handshakes) > min(_MOST_HANDSHAKES, self.most_connections):
            # The connection may be closed by now.
            with suppress(OSError):
                self.handshakes.pop(next(iter(self.handshakes))).shutdown(socket.SHUT_RDWR)
        return connection, peer


class _Parser(h11.Connection):
    """A parser that ends connections which send bodies in many small chunks.

    A small chunk takes as long to parse as a large one, and meanwhile nobody else is answered.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__(h11.SERVER, _HEADER_BYTES)
        self._close = close
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + event.chunk_start, self._bytes + len(event.data)
            if self._chunks > _MOST_CHUNKS and self._bytes < self._chunks * _LEAST_CHUNK_BYTES:
                self._close()
                return h11.NEED_DATA
        return event

    def start_next_cycle(self) -> None:
        super().start_next_cycle()
        self._chunks = self._bytes = 0


class _Protocol(H11Protocol):
    """Closes connections that do not send a request's headers in time: uvicorn waits for them as long as any byte arrives.

    If there are too many connections, it closes the one that has waited longest, so that probes are answered, however many
    connections peers hold open.
    """

    def __init__(self, listener: _Listener, **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(lambda: self.transport.abort())
        self._listener = listener
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._listener.handshakes.pop(transport.get_extra_info("peername"), None)
        self._expect_request()
        if len(self.connections) > self._listener.most_connections:
            others: set[Any] = self.connections
            longest = min(others, key=_Protocol._precedence)
            others.remove(longest)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end_timer()

    def send_400_response(self, msg: str) -> None:
        # If an answer has begun, uvicorn's would raise an error, which asyncio would log as often as a peer likes to cause it.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    def _precedence(self) -> tuple[bool, float]:
        """Return the key by which connections are closed: the idle ones come first, and among these the longest idle.

        A connection whose peer does not read is idle, too: otherwise such peers could keep everyone else out.
        """
        is_working = bool(self.cycle) and not self.cycle.response_complete and not self.flow.write_paused
        return is_working, self._waits_since

    def _expect_request(self) -> None:
        self._end_timer()
        self._waits_since = self.loop.time()
        self._timer = self.loop.call_later(_REQUEST_WITHIN_S, self._close_if_idle, self.cycle)

    def _end_timer(self) -> None:
        # Cancel the old timer: it holds all headers of the last request, and a peer may send thousands before it ends by
        # itself.
        if self._timer:
            self._timer.cancel()

    def _close_if_idle(self, last: Any) -> None:
        if self.cycle is last:
            self.transport.close()


def _load_certificate(config: uvicorn.Config) -> None:
    context: Any = config.ssl
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")


def _listener(settings: ServeSettings, most_connections: int) -> _Listener:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        # By default, IPv4 would reach gRPC's port on ::, but not this one.
        is_dual = settings.host == "::" and socket.has_dualstack_ipv6()
        address = (settings.host, settings.port)
        created = socket.create_server(address, family=family, dualstack_ipv6=is_dual)
    except OSError as error:
        raise SettingsError(f"serve.host, serve.port: cannot listen there: {error.strerror}") from None
    return _Listener(created.detach(), most_connections)
