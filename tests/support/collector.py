"""A collector of spans: a server for OTLP over HTTP in the test's own process, which can be made to hang."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status


class Span(NamedTuple):
    name: str
    otel_trace: str
    span: str
    parent: str
    started_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    is_error: bool
    state: str


class Collector:
    def __init__(self) -> None:
        self.hangs = threading.Event()
        """Set while the collector answers no request."""
        self.raw = b""
        """The bodies of all requests, concatenated."""
        self.headers: dict[str, str] = {}
        """The headers of the last request."""
        self.service: dict[str, Any] = {}
        """The resource of the last request."""
        self._spans: list[Span] = []
        self.ended = threading.Event()

    def collect(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.service = _attributes(resource.resource)
            self._spans += [_span(span) for scope in resource.scope_spans for span in scope.spans]

    def spans(self, otel_trace: str = "") -> list[Span]:
        """Return all spans, or those of one OpenTelemetry trace."""
        return [span for span in self._spans if otel_trace in ("", span.otel_trace)]


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    def collect(request: BaseHTTPRequestHandler, body: bytes) -> None:
        if collector.hangs.is_set():
            collector.ended.wait()
            return
        collector.headers = dict(request.headers)
        collector.collect(body)
        request.send_response(200)
        request.send_header("Content-Length", "0")
        request.end_headers()

    with answering(collect) as url:
        try:
            yield collector, url
        finally:
            collector.ended.set()


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler, bytes], None]) -> Iterator[str]:
    """Serve posts by ``answer``, which gets the request and its body; yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer(self, self.rfile.read(int(self.headers["Content-Length"])))

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _span(span: Any) -> Span:
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    times = span.start_time_unix_nano, span.end_time_unix_nano
    return Span(span.name, *ids, *times, _attributes(span), span.status.code == Status.STATUS_CODE_ERROR, span.trace_state)


def _attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}
