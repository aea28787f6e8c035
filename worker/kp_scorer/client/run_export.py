"""Builds an OpenTelemetry export of the spans of a run. Needs ``kp-scorer[serve]``."""

import base64
import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

_IDS: Final = ("traceId", "spanId", "parentSpanId")


def export_of(spans: Sequence[bytes], weight: int) -> bytes:
    """Return an export in Protobuf of spans that ``serve`` stored, each under the resource and the scope that it came with.

    If the run stands for several, all spans state its ``weight``. Raises ValueError if they are not spans of OTLP.
    """
    by_source: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    weights = [{"key": "SampleRate", "value": {"intValue": weight}}] if weight > 1 else []
    try:
        for span in map(json.loads, spans):
            # Leave out the events that came as logs, which are not spans.
            if "body" not in span:
                source = span.pop("source", "[{}, {}, 0]")
                own = [*span["attributes"][json.loads(source)[2] :], *weights]
                links = [_with_bytes(link) for link in span.get("links") or ()]
                by_source[source].append(_with_bytes(span) | {"attributes": own, "links": links})
        groups = [(*json.loads(source), group) for source, group in by_source.items()]
        request = {
            "resourceSpans": [
                {"resource": resource, "scopeSpans": [{"scope": scope, "spans": group}]} for resource, scope, _, group in groups
            ]
        }
        exported: bytes = ParseDict(request, ExportTraceServiceRequest(), ignore_unknown_fields=True).SerializeToString()
    except (ParseError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(type(error).__name__) from None
    return exported


def rejected_of_spans(answer: bytes) -> tuple[int, str]:
    """Return the number of spans that a receiver rejected though it accepted the export, and its message on them."""
    try:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, partial.error_message


def _with_bytes(fields: dict[str, Any]) -> dict[str, Any]:
    # OTLP's JSON has ids in hexadecimal, unlike the JSON of other Protobuf messages.
    return fields | {name: base64.b64encode(bytes.fromhex(fields[name])).decode() for name in _IDS if fields.get(name)}
