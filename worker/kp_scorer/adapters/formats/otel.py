"""Spans of OpenTelemetry, by the conventions of GenAI and OpenInference and by the dialects of many exporters.

A source is an export in the JSON of the protocol (``resourceSpans``, ``resourceLogs``), which the Collector's file exporter
writes too; a span that the console exporter of Python's SDK prints; or an answer of Tempo, Jaeger or Zipkin. All spans of one
trace id are one run. A status of Ok means little, as many frameworks set it wherever nothing was raised.

Specification: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.attributes import SERVICE, any_value, attributes_of, integer, normalized_id
from kp_scorer.adapters.building import Run
from kp_scorer.adapters.columns import span_of_row
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.node import Node, objects_in, parsed
from kp_scorer.adapters.span import Spans
from kp_scorer.adapters.timeline import run_of

_IS_LOG: Final = "isLog"
_LATE_NS: Final = 10_000_000_000  # A span that another process exports may end this long after the root of its run.
_OPEN_NS: Final = 900_000_000_000  # A run waits this long for spans that other spans refer to.
_LOOKS_AGAIN_AFTER: Final = 8  # A run that waits is looked at again after its age divided by this number.
_EXPORTS: Final = {"resourceSpans", "resourceLogs", "batches"}


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is an export or a span."""
    pages = objects_in(value.get("data")) or [value]
    is_export = any(isinstance(holder, dict) and _EXPORTS & set(holder) for holder in (value, value.get("trace")))
    return is_export or _is_span(value) or all("traceID" in page and "spans" in page for page in pages)


def _is_span(value: object) -> bool:
    return isinstance(value, dict) and ({"traceId", "spanId"} <= set(value) or _is_row(value))


def _is_row(span: dict[str, Any]) -> bool:
    """Return whether an object is a span as Python's console exporter or Zipkin writes it."""
    is_of_console = isinstance(span.get("context"), dict) and "trace_id" in span["context"]
    return is_of_console or {"traceId", "id", "duration"} <= set(span)


def records(source: Node) -> list[Node]:
    """Return the spans of an export, or of a list of exports."""
    return [span for export in source.each() for span in _spans_in(export)]


def _spans_in(export: Node) -> Iterator[Node]:
    if _is_span(export.value):
        yield span_of_row(export) if _is_row(export.value) else export
    elif any("traceID" in page for page in objects_in(export.at("data").value)) or "traceID" in export.object():
        for page in export.at("data").items() or [export]:
            yield from (_span_of_jaeger(span, page) for span in page.at("spans").items())
    else:
        holder = export if export.at("trace").value is None else export.at("trace")
        resources = holder.first("resourceSpans", "resourceLogs", "batches")
        if resources.value is None:
            raise resources.refusal("expected an export of spans, with resourceSpans, resourceLogs or batches")
        for resource in resources.items():
            for scope in resource.first("scopeSpans", "scopeLogs").items():
                around = {"resource": resource.at("resource").value, "scope": {"name": scope.at("scope", "name").value}}
                for item in scope.first("spans", "logRecords").items():
                    is_log = isinstance(item.value, dict) and "body" in item.value
                    yield _event_of_log(item) if is_log else item._replace(value=around | item.object())


def _span_of_jaeger(span: Node, page: Node) -> Node:
    parents = [each.get("spanID") for each in objects_in(span.at("references").value) if each.get("refType") == "CHILD_OF"]
    tags, process = _by_key(span.at("tags")), ("processes", span.at("processID").text())
    logs = [_by_key(log.at("fields")) for log in span.at("logs").items()]
    fields = {
        "parentId": next(iter(parents), None),
        "name": span.at("operationName").value,
        "scope": {"name": tags.get("otel.scope.name")},
        "events": [{"name": log.pop("event", ""), "attributes": log} for log in logs],
        "resource": {"attributes": _by_key(page.at(*process, "tags")) | {SERVICE: page.at(*process, "serviceName").value}},
        "tags": tags,
    }
    return span_of_row(span._replace(value=span.object() | fields))


def _by_key(pairs: Node) -> dict[str, Any]:
    return {pair.at("key").required_text(): pair.at("value").value for pair in pairs.items()}


def _event_of_log(log: Node) -> Node:
    """Return a record of a log as an event of the span during which it was written."""
    body, attributes = parsed(any_value(log.at("body"))), attributes_of(log).object()
    named = {"name": log.at("eventName").text() or attributes.get("event.name")}
    event = named | {"attributes": attributes | (body if isinstance(body, dict) else {})}
    ids = {"traceId": log.at("traceId").value, "parentSpanId": log.first("parentSpanId", "spanId").value}
    time_ns = log.first("timeUnixNano", "observedTimeUnixNano").value
    return log._replace(value=event | ids | {_IS_LOG: True, "startTimeUnixNano": time_ns})


def starts(span: Node) -> int:
    """Return the time when a span began, in nanoseconds since 1970; 0 for one in the future, by which all runs would end."""
    began_ns = integer(span.at("startTimeUnixNano"))
    return began_ns if began_ns <= time.time_ns() else 0


def ends(spans: Sequence[Node]) -> int | None:
    """Return the time when a run is complete, in nanoseconds since 1970; None unless its newest span is a root that ended."""
    end = spans[-1].at("endTimeUnixNano")
    return None if spans[-1].at("parentSpanId").text() or end.value is None else integer(end) + _LATE_NS


def waits(spans: Sequence[Node], now_ns: int) -> int | None:
    """Return the time until which a run waits for all but its root, or for the parent of a span; None if it waits for none."""
    ids = {normalized_id(span.at("spanId")) for span in spans}
    parents = {parent for span in spans if (parent := normalized_id(span.at("parentSpanId")))}
    is_complete = parents <= ids and (len(spans) != 1 or Spans(spans).all[0].inputs)
    times_ns = [integer(span.at("startTimeUnixNano")) for span in spans]
    if is_complete or now_ns > max(times_ns) + _OPEN_NS:
        return None
    # Each look reads all spans of a run, so look less and less often at a run that goes on for days, or whose clock is ahead.
    age_ns = abs(now_ns - min(filter(None, times_ns), default=now_ns))
    return now_ns + max(_LATE_NS, age_ns // _LOOKS_AGAIN_AFTER)


def run_id(span: Node) -> str:
    """Return the trace id of a span."""
    span.at("traceId").required_text()
    return normalized_id(span.at("traceId"))


def run(own_id: str, nodes: Sequence[Node]) -> Run | list[Run]:
    """Make a run of the spans of one trace id; return an empty list if none of them is an agent's."""
    # Keep the last record of a span, which may be exported twice: when it begins and when it ends, for example.
    latest = {normalized_id(node.at("spanId")): node for node in nodes if node.at("spanId").value}
    logs: defaultdict[str, list[Any]] = defaultdict(list)
    for log in (node for node in nodes if _IS_LOG in node.object()):
        logs[normalized_id(log.at("parentSpanId"))].append(log.value)
    for span_id in logs.keys() & latest.keys():
        span = latest[span_id]
        events = [*(event.value for event in span.at("events").items()), *logs[span_id]]
        latest[span_id] = span._replace(value=span.object() | {"events": events})
    return run_of("otel", own_id, Spans(list(latest.values())))


FORMAT = Format(fits, run, records, run_id, starts, ends, waits)
