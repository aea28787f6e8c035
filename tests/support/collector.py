"""A collector of spans: a server that takes OTLP over HTTP, in this process, and may hang."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status


class Seen(NamedTuple):
    """A span as it came."""

    name: str
    otel_trace: str
    span: str
    parent: str
    begun_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool
    state: str


class Collector:
    """What has come so far."""

    def __init__(self) -> None:
        self.hangs = threading.Event()
        """Whether it answers no more."""
        self.raw = b""
        """All requests, one after the other."""
        self.service: dict[str, Any] = {}
        """What the last exporter says of itself."""
        self._spans: list[Seen] = []
        self._ended = threading.Event()

    def take(self, body: bytes) -> None:
        """Note a request."""
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.service = _attributes(resource.resource)
            self._spans += [_seen(span) for scope in resource.scope_spans for span in scope.spans]

    def spans(self) -> list[Seen]:
        """All spans."""
        return list(self._spans)

    def answers(self) -> bool:
        """Wait as long as it hangs; tell whether there is still somebody to answer."""
        if self.hangs.is_set():
            self._ended.wait()
        return not self._ended.is_set()

    def end(self) -> None:
        """Let go of those who wait."""
        self._ended.set()


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    """Run a collector; give it, and its URL."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if collector.answers():
                collector.take(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_port}"
        finally:
            collector.end()
            server.shutdown()
            thread.join()


def _seen(span: Any) -> Seen:
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    times = span.start_time_unix_nano, span.end_time_unix_nano
    return Seen(span.name, *ids, *times, _attributes(span), span.status.code == Status.STATUS_CODE_ERROR, span.trace_state)


def _attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}
