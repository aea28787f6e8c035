"""Where Prometheus fetches a worker's metrics: HTTP, on a port of their own and threads of their own."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.registry import Collector

from kp_scorer.errors import SettingsError
from kp_scorer.settings import MetricsSettings

_PATH: Final = "/metrics"
_AT_ONCE: Final = 8
_STUCK_S: Final = 10.0
"""Whoever neither asks nor reads for so long is hung up on; meanwhile a thread waits, and nothing else."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _STUCK_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != _PATH:
            self.send_error(404)
            return
        assert isinstance(self.server, _Server)
        shown = generate_latest(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(shown)))
        self.end_headers()
        self.wfile.write(shown)

    def version_string(self) -> str:
        return "kp-scorer"

    def log_message(self, *_: Any) -> None:
        """Log nothing: a line a scrape would drown the others."""


# Not http.server's, which looks its own name up in the DNS.
class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, settings: MetricsSettings, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        self.registry = registry
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__((settings.host, settings.port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        # Whoever opens many connections at once gets no thread for each.
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, *_: Any) -> None:
        """Say nothing of whoever hung up."""


@contextmanager
def metrics_server(settings: MetricsSettings, collector: Collector) -> Iterator[None]:
    """Serve what is collected, and what the process uses, while the context lasts.

    Raises:
        SettingsError: the port is in use, or the host is none of this machine's.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    try:
        server = _Server(settings, registry)
    except OSError as error:
        raise SettingsError(f"metrics.host, metrics.port: cannot listen there: {error.strerror}") from None
    with server:
        threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
