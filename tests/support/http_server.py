"""The HTTP server in a process of its own, requests to it, and spans in the form that exporters send."""

import json
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache, reduce
from http.client import HTTPConnection
from pathlib import Path
from struct import pack
from typing import Any, Final, NamedTuple
from uuid import uuid4

from google.protobuf.json_format import ParseDict
from kp_scorer.settings import Settings
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.changed_settings import with_changed
from tests.support.processes import Worker, free_port, launch_worker, wait_until

SERVE: Final = ("tests.support.constants", "kp_scorer.cli", "serve")
CONTAINER_BYTES: Final = 2**30
"""The memory of the server's container in deploy."""

CONTAINER_SERVE: Final = ("tests.support.limited", str(CONTAINER_BYTES), "512:4096", *SERVE)
SUPPLIED: Final[Mapping[str, Any]] = {
    "serve__confidence": 0.8,
    "serve__success": True,
    "serve__quiet_s": 0.3,
    # With 0 the server does without gRPC: several tests run servers at once, which cannot share the default port.
    "serve__grpc_port": 0,
}


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HttpServer:
    """A process of ``kp-scorer serve``, which tests can kill and start again on the same port."""

    def __init__(self, settings: Settings, log: Path, command: Sequence[str]) -> None:
        self._command = command
        self.port = free_port()
        self._settings = with_changed(settings, serve__port=self.port)
        self._log = log
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: Worker = self.start()

    def start(self) -> Worker:
        self.process = launch_worker(self._settings, self._log, self._command)
        self.process.wait_until_ready("serve_ready")
        return self.process

    def ask(self, method: str, path: str, body: object = b"", **headers: str) -> Answer:
        """Send a request; return the answer.

        Underscores in names of headers become hyphens; a body becomes JSON unless it is bytes.
        """
        named = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=90)) as connection:
            connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode(), named)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())

    def export(self, *spans: Mapping[str, Any], **resource: object) -> Answer:
        """Send spans in OTLP's JSON."""
        return self.ask("POST", "/v1/traces", export_of(*spans, **resource))

    def status(self, run_id: str, **headers: str) -> dict[str, Any]:
        """Wait until a run has ended, and return its status."""
        path = f"/traces/kp:trace:otel:{run_id}"

        def ended() -> dict[str, Any]:
            status: dict[str, Any] = self.ask("GET", path, **headers).json
            return status if status.get("state") in ("decided", "dead") else {}

        return dict(wait_until(ended))


@contextmanager
def open_server(settings: Settings, log: Path, *command: str, **changed: object) -> Iterator[HttpServer]:
    """Run the server, or another command, with settings for what spans lack; check that it stops with exit code 0."""
    server = HttpServer(with_changed(settings, **{**SUPPLIED, **changed}), log, command or SERVE)
    try:
        yield server
    finally:
        server.process.stop()
    assert server.process.process.returncode == 0


def attributes(**values: object) -> list[dict[str, Any]]:
    return [{"key": key.replace("__", "."), "value": {"stringValue": str(value)}} for key, value in values.items()]


def export_of(*spans: Mapping[str, Any], **resource: object) -> dict[str, Any]:
    return {"resourceSpans": [{"resource": {"attributes": attributes(**resource)}, "scopeSpans": [{"spans": list(spans)}]}]}


def in_protobuf(export: dict[str, Any]) -> bytes:
    """Return an export as an exporter sends it, with ids as bytes."""
    spans = export["resourceSpans"][0]["scopeSpans"][0]["spans"]
    message = ParseDict(export, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    for span, fields in zip(message.resource_spans[0].scope_spans[0].spans, spans, strict=True):
        span.trace_id, span.span_id = bytes.fromhex(fields["traceId"]), bytes.fromhex(fields["spanId"])
        span.parent_span_id = bytes.fromhex(fields["parentSpanId"])
    encoded: bytes = message.SerializeToString()
    return encoded


def text_message(role: str, content: str) -> str:
    """Return a message in the JSON that the GenAI conventions prescribe for an attribute."""
    return json.dumps([{"role": role, "parts": [{"type": "text", "content": content}]}])


def chat_span(run_id: str, parent: str = "", said: str = "At 04:12.", **values: object) -> dict[str, Any]:
    """Return the span of a model's call in the run with this id, as JSON; it is the root unless it has a parent."""
    texts = {"input": ("user", "When is high water?"), "output": ("assistant", said)}
    messages = {f"gen_ai__{direction}__messages": text_message(*said_by) for direction, said_by in texts.items()}
    now_ns = time.time_ns()
    return {
        "traceId": run_id,
        "spanId": uuid4().hex[:16],
        "parentSpanId": parent,
        "name": "chat",
        "startTimeUnixNano": str(now_ns),
        "endTimeUnixNano": str(now_ns + 1_000_000),
        "attributes": attributes(gen_ai__operation__name="chat", **messages, **values),
    }


def new_run() -> str:
    return uuid4().hex


@cache
def packed_zeros(mebibytes: int) -> bytes:
    """Return this many mebibytes of zeros, compressed by gzip."""
    mebibyte = bytes(2**20)
    packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    # After a full flush, the same content compresses to the same bytes, so compressing one mebibyte is enough.
    packed = packing.compress(mebibyte) + packing.flush(zlib.Z_FULL_FLUSH)
    checksum = reduce(lambda checksum, each: zlib.crc32(each, checksum), [mebibyte] * mebibytes, 0)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + packed * mebibytes + b"\3\0" + pack("<II", checksum, mebibytes << 20)
