"""Spans as exporters of OpenTelemetry send them over HTTP, in Protobuf or JSON, and what they are answered.

Specification: https://opentelemetry.io/docs/specs/otlp/#otlphttp
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from google.protobuf.json_format import MessageToDict, MessageToJson
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

from kp_scorer.adapters.node import source
from kp_scorer.decoding import Limits, parse_json
from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.ledger.runs import ReceivedSpan

JSON: Final = "application/json"
PROTOBUF: Final = "application/x-protobuf"
SERVICE: Final = "service.name"
SUPPLIED: Final = ("confidence", "domain", "privacy_level", "success", "visibility")
"""What spans do not carry by any convention: attributes of these names after ``kp.`` do, on a root or its resource."""

_OF_RESOURCES: Final = frozenset({SERVICE, *(f"kp.{name}" for name in SUPPLIED)})
"""The attributes of a resource that its spans keep."""
_TRACE_ID: Final = re.compile("(?!0{32})[0-9a-f]{32}")
_SPAN_ID: Final = re.compile("(?!0{16})[0-9a-f]{16}")
"""Zeros are no id by the specification: spans of any agents may have them."""
_MOST_SPANS: Final = 20_000
_MOST_SPAN_BYTES: Final = 1_048_576  # Of one span: parsed, it takes up to two hundred times as much memory.
_MOST_LASTING_BYTES: Final = 1_024  # Of what all spans of a resource keep of it.

Fields = dict[str, Any]  # A span in OTLP's JSON.


def spans_in(body: bytes, media_type: str, limits: Limits) -> tuple[dict[str, list[ReceivedSpan]], int]:
    """Read an export: its spans by the ids of their runs, and how many were none, or too large.

    Raises InvalidTrace, NotConverted: it is none; the error names the place, never the content.
    """
    by_run: defaultdict[str, list[ReceivedSpan]] = defaultdict(list)
    rejected = 0
    for number, fields in enumerate(_from_json(body, limits) if media_type == JSON else _from_protobuf(body)):
        if number == _MOST_SPANS:
            raise InvalidTrace([Problem("$", f"expected at most {_MOST_SPANS} spans")])
        run_id, span_id = (str(fields.get(name)).lower() for name in ("traceId", "spanId"))
        if _TRACE_ID.fullmatch(run_id) and _SPAN_ID.fullmatch(span_id):
            # Nothing of a span that is too large: its run is.
            content = _as_bytes(fields) if "attributes" in fields else b""
            content = content if len(content) <= _MOST_SPAN_BYTES else b""
            by_run[run_id].append(ReceivedSpan(span_id, not fields.get("parentSpanId"), content))
        else:
            rejected += 1
    return by_run, rejected


def _from_json(body: bytes, limits: Limits) -> Iterator[Fields]:
    for resource in source(1, parse_json(body, limits)).at("resourceSpans").items():
        holder = resource.at("resource")
        of_resource = holder.at("attributes").items() if holder.value is not None else []
        lasting = _checked([pair.value for pair in of_resource if pair.at("key").text() in _OF_RESOURCES])
        for scope in resource.at("scopeSpans").items():
            for span in scope.at("spans").items():
                yield span.object() | {"attributes": [*lasting, *(pair.value for pair in span.at("attributes").items())]}


def _from_protobuf(body: bytes) -> Iterator[Fields]:
    try:
        export = messages.ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise InvalidTrace([Problem("$", "expected an ExportTraceServiceRequest in Protobuf")]) from None
    for resource in export.resource_spans:
        lasting = _checked([MessageToDict(pair) for pair in resource.resource.attributes if pair.key in _OF_RESOURCES])
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            # Unlike other JSON of Protobuf, OTLP's has ids in hexadecimal.
            ids = {"traceId": span.trace_id.hex(), "spanId": span.span_id.hex(), "parentSpanId": span.parent_span_id.hex()}
            if span.ByteSize() > _MOST_SPAN_BYTES:
                yield ids
                continue
            fields = MessageToDict(span, use_integers_for_enums=True)
            yield fields | ids | {"attributes": [*lasting, *fields.get("attributes", ())]}


def _checked(lasting: list[Any]) -> list[Any]:
    if len(_as_bytes(lasting)) > _MOST_LASTING_BYTES:
        raise InvalidTrace([Problem("resource", f"expected {SERVICE} and kp.* of at most {_MOST_LASTING_BYTES} bytes")])
    return lasting


def _as_bytes(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def export_of(spans: Sequence[bytes]) -> bytes:
    """Stored spans as one export."""
    return b'{"resourceSpans":[{"scopeSpans":[{"spans":[%s]}]}]}' % b",".join(spans)


def success(media_type: str, rejected: int, message: str) -> bytes:
    """The answer to an export of which all but ``rejected`` spans are stored, because of ``message``."""
    partly = messages.ExportTracePartialSuccess(rejected_spans=rejected, error_message=message) if rejected else None
    return _encoded(messages.ExportTraceServiceResponse(partial_success=partly), media_type)


def failure(media_type: str, message: str) -> bytes:
    """The answer to an export that was not taken: a ``google.rpc.Status``."""
    if media_type == JSON:
        return json.dumps({"message": message}).encode()
    # Its message has the same field number in both.
    return _encoded(messages.ExportTracePartialSuccess(error_message=message), PROTOBUF)


def _encoded(message: Any, media_type: str) -> bytes:
    encoded: bytes = MessageToJson(message, indent=None).encode() if media_type == JSON else message.SerializeToString()
    return encoded
