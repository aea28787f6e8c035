"""The process that serves: its socket, TLS, the time that a peer may take, and what SIGTERM does."""

import logging
import signal
import socket
import ssl
from asyncio import Transport
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import h11
import structlog
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.files import check_writer
from kp_scorer.logs import count_dropped_lines
from kp_scorer.monitoring import http_server
from kp_scorer.serve.counters import ServeMetrics
from kp_scorer.serve.routes import make_app, read_tokens
from kp_scorer.serve.submitter import Submitter
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import ServeSettings
from kp_scorer.store import Store

_REQUEST_WITHIN_S: Final = 15.0  # A connection is closed if no request, with all its headers, has begun on it by then.
_HEADER_BYTES: Final = 16_384
_MOST_CHUNKS: Final = 1_000  # The most chunks of a body if they are smaller on average than this:
_LEAST_CHUNK_BYTES: Final = 64
_MOST_CONNECTIONS: Final = 512
_MOST_HANDSHAKES: Final = 128
# These include requests whose connections are closed, until they are answered. Requests beyond them get 503.
_MOST_REQUESTS: Final = 1_024

log = structlog.get_logger("kp_scorer.serve.server")


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then answer the requests in progress.

    Raises SettingsError if the tokens, the certificate or the port cannot be used.
    """
    tokens = read_tokens(settings.serve.tokens)
    _check_certificate(settings.serve)
    listener = _listener(settings.serve)
    # The size of a record in TLS. Asyncio's own buffers take 256 kB for each connection, even a closed one until it is
    # collected.
    SSLProtocol.max_size = 16_384
    # Uvicorn logs what any peer can cause, and errors with their messages, which may quote a trace.
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
    metrics = ServeMetrics()
    count_dropped_lines(metrics.log_lines_dropped.inc)
    with ExitStack() as opened:
        opened.enter_context(listener)
        store = opened.enter_context(Store.open(settings, metrics))
        clients = {queue: opened.enter_context(Client(settings, queue=queue)) for queue in {"", *tokens.values()}}
        submitter = opened.enter_context(Submitter(settings, store, clients, metrics))
        metrics.ready.set_function(lambda: not (submitter.why_not_live() or submitter.why_not_ready()))
        reasons = submitter.why_not_live, submitter.why_not_ready
        opened.enter_context(http_server(settings.metrics.of_serve(), metrics.registry, *reasons))
        app = metrics.measured(make_app(settings, store, clients, tokens, submitter, metrics))
        config = _config(settings, app, listener)
        if settings.serve.certificate:
            listener.before_accept = _Renewal(settings.serve, config).renew
        server = uvicorn.Server(config)
        # For a signal before uvicorn runs, and for the same signal once more, by which it ends.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, server.handle_exit)
        log.info("serve_ready", host=settings.serve.host, port=listener.getsockname()[1], tls=bool(settings.serve.certificate))
        server.run(sockets=[listener])
    log.info("serve_stopped")


def _config(settings: Settings, app: Any, listener: "_Listener") -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(_Protocol, listener.handshakes),  # type: ignore[arg-type]  # calls it alone
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=64,
        limit_concurrency=_MOST_REQUESTS,
        timeout_graceful_shutdown=int(settings.worker.grace_s),
        ssl_certfile=settings.serve.certificate or None,
        ssl_keyfile=settings.serve.key or None,
    )


class _Listener(socket.socket):
    """Closes the oldest of too many connections in TLS's handshake; asyncio waits a minute for each of them."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.handshakes: dict[Any, socket.socket] = {}  # By the address of the peer.
        self.before_accept: Callable[[], None] = lambda: None

    def accept(self) -> tuple[socket.socket, Any]:
        self.before_accept()
        connection, peer = super().accept()
        self.handshakes[peer] = connection
        if len(self.handshakes) > _MOST_HANDSHAKES:
            # The connection may be closed by now.
            with suppress(OSError):
                self.handshakes.pop(next(iter(self.handshakes))).shutdown(socket.SHUT_RDWR)
        return connection, peer


class _Parser(h11.Connection):
    # Ends connections that send bodies in many small chunks: a small chunk takes as long to parse as a large one, and meanwhile
    # nobody else is answered.

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
    # Closes connections whose next request does not begin in time, as uvicorn waits for headers as long as any byte arrives.
    # Beyond the most connections it closes the one that has waited longest, so that probes are answered whatever peers hold
    # open.

    def __init__(self, handshakes: dict[Any, socket.socket], **options: Any) -> None:
        super().__init__(**options)
        self.conn = _Parser(lambda: self.transport.abort())
        self._handshakes = handshakes

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._handshakes.pop(transport.get_extra_info("peername"), None)
        self._expect_request()
        if len(self.connections) > _MOST_CONNECTIONS:
            others: set[Any] = self.connections
            longest = min(others, key=_Protocol._precedence)
            others.remove(longest)
            longest.transport.abort()

    def on_response_complete(self) -> None:
        self._expect_request()
        super().on_response_complete()

    def _precedence(self) -> tuple[bool, float]:
        is_working = bool(self.cycle) and not self.cycle.response_complete
        return is_working, self._waits_since

    def _expect_request(self) -> None:
        self._waits_since = self.loop.time()
        self.loop.call_later(_REQUEST_WITHIN_S, self._close_if_idle, self.cycle)

    def _close_if_idle(self, last: Any) -> None:
        if self.cycle is last:
            self.transport.close()


class _Renewal:
    """Puts a certificate that was replaced in use for new connections, as one expires sooner than a process ends."""

    def __init__(self, settings: ServeSettings, config: uvicorn.Config) -> None:
        self._settings, self._config = settings, config
        self._last = self._files()

    def _files(self) -> list[tuple[int, int]]:
        states = (Path(file).stat() for file in (self._settings.certificate, self._settings.key))
        return [(state.st_ino, state.st_mtime_ns) for state in states]

    def renew(self) -> None:
        """Read both files again if either has changed; a pair that does not fit, or not yet, leaves the old one in use."""
        with suppress(OSError):
            if (files := self._files()) == self._last:
                return
            self._last = files
            try:
                # A pair that does not fit would break the context.
                _check_certificate(self._settings)
            except SettingsError as error:
                log.warning("certificate_not_renewed", detail=str(error))
                return
            context: Any = self._config.ssl
            context.load_cert_chain(self._settings.certificate, self._settings.key, password="")
            log.info("certificate_renewed")


def _check_certificate(settings: ServeSettings) -> None:
    if not settings.certificate:
        return
    try:
        for file in (settings.certificate, settings.key):
            check_writer(file)
        # Without a password OpenSSL would ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key, password="")
    except OSError as error:
        raise SettingsError(f"serve.certificate, serve.key: cannot be used: {error.strerror}") from None


def _listener(settings: ServeSettings) -> _Listener:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        created = socket.create_server((settings.host, settings.port), family=family, backlog=256)
    except OSError as error:
        raise SettingsError(f"serve.host, serve.port: cannot listen there: {error.strerror}") from None
    return _Listener(fileno=created.detach())
