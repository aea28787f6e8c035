"""Serves ``/livez``, ``/readyz`` and ``/metrics`` on a port of the process. A peer costs at most a thread and a few kB."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import ThreadingTCPServer
from typing import Any, Final
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from kp_scorer.errors import SettingsError
from kp_scorer.settings.sections import MetricsSettings

_OPEN_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 5.0  # A peer that takes longer to send its request, or to read a part of the answer, is disconnected.
_ROOM_WITHIN_S: Final = 0.5
_REQUEST_BYTES: Final = 8_192

log = structlog.get_logger("kp_scorer.monitoring")

Reasons = Callable[[], Sequence[str]]


class _Handler(BaseHTTPRequestHandler):
    server: "_Server"

    def handle(self) -> None:
        """Answer a request once the blank line behind its headers has arrived; disconnect a peer that exceeds the limits."""
        # ``http.server`` would read 6.5 MB of headers, and allow each line its own time.
        request, deadline = b"", time.monotonic() + _TIMEOUT_S
        with suppress(OSError):
            while b"\n\r\n" not in request and b"\n\n" not in request:
                self.connection.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = self.connection.recv(_REQUEST_BYTES)
                request += chunk
                if not chunk or len(request) > _REQUEST_BYTES:
                    return
            self.connection.settimeout(_TIMEOUT_S)
            self.rfile.close()
            self.rfile = BytesIO(request)
            super().handle()

    def do_GET(self) -> None:
        """Answer with a page, or without its body if the method is HEAD."""
        status, content_type, body = self.server.answer(urlsplit(self.path).path, self.headers.get("Accept"))
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - some monitors probe by it

    def log_message(self, *_: Any) -> None:
        """Log nothing: a peer could fill the log."""


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, settings: MetricsSettings, registry: CollectorRegistry, why_not_live: Reasons, why_not_ready: Reasons
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._registry = registry
        self._probes: dict[str, Reasons] = {"/livez": why_not_live, "/readyz": lambda: why_not_live() or why_not_ready()}
        self._open: list[socket.socket] = []
        self._closed = threading.Condition()
        super().__init__((settings.host, settings.port), _Handler)

    def answer(self, path: str, accept: str | None) -> tuple[HTTPStatus, str, bytes]:
        """Return the status, the type and the body of a page."""
        if path == "/metrics":
            encode, content_type = choose_encoder(accept or "")
            return HTTPStatus.OK, content_type, encode(self._registry)
        if path not in self._probes:
            return HTTPStatus.NOT_FOUND, "text/plain", b""
        reasons = list(self._probes[path]())
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return status, "application/json", (json.dumps({"pid": os.getpid(), "reasons": reasons}) + "\n").encode()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Close the oldest connection if there is no room, so that idle ones cannot keep a probe out."""
        with self._closed:
            # After SHUT_RD, the oldest connection may still answer the request that it has received.
            for how in (socket.SHUT_RD, socket.SHUT_RDWR):
                if len(self._open) >= _OPEN_AT_ONCE:
                    with suppress(OSError):
                        self._open[0].shutdown(how)
                    self._closed.wait_for(lambda: len(self._open) < _OPEN_AT_ONCE, _ROOM_WITHIN_S)
            has_room = len(self._open) < _OPEN_AT_ONCE
            if has_room:
                self._open.append(request)
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._closed, suppress(ValueError):
            self._open.remove(request)
            self._closed.notify()

    def handle_error(self, *_: Any) -> None:
        """Log nothing, as a peer could fill the log."""


@contextmanager
def http_server(
    settings: MetricsSettings, registry: CollectorRegistry, why_not_live: Reasons, why_not_ready: Reasons
) -> Iterator[None]:
    """Serve probes and metrics until the context ends, unless the port is 0 or in use, which is logged.

    Raises SettingsError if it cannot listen there for another reason, such as a host that is not this machine's.
    """
    with ExitStack() as serving:
        if settings.port:
            try:
                server = serving.enter_context(_Server(settings, registry, why_not_live, why_not_ready))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise SettingsError(f"metrics.host, metrics.port: cannot listen there: {error.strerror}") from None
                # Another process, such as a second worker, has the port. Do everything else without it.
                detail = "no probes and no metrics: give each process a metrics.port"
                log.warning("port_in_use", port=settings.port, detail=detail)
            else:
                threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
                serving.callback(server.shutdown)
        yield
