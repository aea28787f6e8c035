"""The HTTP port of a process, with ``/livez``, ``/readyz`` and ``/metrics``. No peer costs more than a thread and some kB."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http import HTTPStatus
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any, Final

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kp_scorer.errors import SettingsError
from kp_scorer.settings.sections import MetricsSettings

_OPEN_AT_ONCE: Final = 8
_TIMEOUT_S: Final = 5.0  # A peer that takes longer to send its request, or then to read the answer, is disconnected.
_ROOM_WITHIN_S: Final = 0.5
_REQUEST_BYTES: Final = 8_192
_BLANK_LINE: Final = b"\r\n\r\n"

log = structlog.get_logger("kp_scorer.monitoring")

Reasons = Callable[[], Sequence[str]]


# Not http.server's, which reads 6.5 MB of headers, and gives each line of them its time.
class _Handler(BaseRequestHandler):
    server: "_Server"

    def handle(self) -> None:
        """Answer a request once the blank line behind its headers is there; none if that is not within the limits."""
        request, deadline = b"", time.monotonic() + _TIMEOUT_S
        with suppress(OSError):
            while b"\n\r\n" not in request and b"\n\n" not in request:
                self.request.settimeout(max(0.001, deadline - time.monotonic()))
                chunk = self.request.recv(_REQUEST_BYTES)
                request += chunk
                if not chunk or len(request) > _REQUEST_BYTES:
                    return
            self.request.settimeout(_TIMEOUT_S)
            self.request.sendall(self.server.answer(request))


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, settings: MetricsSettings, pages: Mapping[bytes, Callable[[], bytes]]):
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self._pages = pages
        self._open: list[socket.socket] = []
        self._closed = threading.Condition()
        super().__init__((settings.host, settings.port), _Handler)

    def answer(self, request: bytes) -> bytes:
        method, _, path = request.partition(b"\n")[0].partition(b" ")
        page = self._pages.get(path.partition(b" ")[0].partition(b"?")[0].strip())
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.NOT_IMPLEMENTED)
        response = page() if page else _response(HTTPStatus.NOT_FOUND)
        # Some monitors probe by HEAD, which gets the same headers alone.
        return response if method == b"GET" else response.partition(_BLANK_LINE)[0] + _BLANK_LINE

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, once there is room: the oldest makes it, so that idle connections keep no probe out."""
        with self._closed:
            # First it may still answer what it has received.
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
        """Log nothing of what a peer can cause."""


def _probed(reasons: Sequence[str]) -> bytes:
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    body = json.dumps({"pid": os.getpid(), "reasons": list(reasons)}) + "\n"
    return _response(status, "application/json", body.encode())


def _response(status: HTTPStatus, content_type: str = "text/plain", body: bytes = b"") -> bytes:
    head = f"HTTP/1.0 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def http_server(
    settings: MetricsSettings,
    registry: CollectorRegistry,
    why_not_live: Reasons,
    why_not_ready: Reasons,
    *,
    port_setting: str = "metrics.port",
) -> Iterator[None]:
    """Serve probes and metrics while the context lasts, unless the port is 0, or in use, which is logged.

    SettingsError if it cannot listen there for another reason, such as a host that is not this machine's.
    """
    pages = {
        b"/metrics": lambda: _response(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)),
        b"/livez": lambda: _probed(why_not_live()),
        b"/readyz": lambda: _probed(why_not_live() or why_not_ready()),
    }
    with ExitStack() as serving:
        if settings.port:
            try:
                server = serving.enter_context(_Server(settings, pages))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise SettingsError(f"metrics.host, {port_setting}: cannot listen there: {error.strerror}") from None
                # Another process has the default port. Nothing else needs it.
                detail = f"no probes and no metrics: give each process a {port_setting}"
                log.warning("port_in_use", port=settings.port, detail=detail)
            else:
                threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
                serving.callback(server.shutdown)
        yield
