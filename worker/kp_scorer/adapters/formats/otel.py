"""Spans of OpenTelemetry, by the conventions of GenAI, OpenInference, the AI SDK and OpenLLMetry.

A source is an export in the JSON of the protocol (``resourceSpans``), which the Collector's file exporter writes too, or a span
that the console exporter of Python's SDK prints. All spans of one trace id are one run. If the status of its only root is an
error, the run did not succeed. A status of Ok means less, as many frameworks set it wherever nothing was raised.

Specifications: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding for the form,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ for ``gen_ai.*``,
https://arize-ai.github.io/openinference/spec/semantic_conventions.html for OpenInference.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, microseconds, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import Piece, Speaker, Transcript, pieces_in, pieces_of_message, text_in, utterance
from kp_scorer.adapters.node import MOST_DEPTH, Node, objects_in
from kp_scorer.adapters.timeline import KINDS, Span, SpanKind, run_of

_MOST_DIGITS: Final = 19  # A number of 64 bits has at most this many. It is a text, as numbers in JSON are less exact.
_ERROR: Final = (2, "STATUS_CODE_ERROR")
_MODEL_ATTRIBUTES: Final = ("ai.prompt.messages", "gen_ai.prompt.", "gen_ai.completion.")
_VALUES: Final = {"input": ("ai.prompt.messages", "ai.prompt", "traceloop.entity.input"), "output": ("ai.response.object",)}
"""Attributes of the AI SDK and of OpenLLMetry, beside OpenInference's ``input.value`` and ``output.value``."""
_GENAI: Final = ("gen_ai.operation.name", "gen_ai.input.messages", "gen_ai.output.messages")
"""Each span of the GenAI conventions has one of these attributes."""
_LATE_NS: Final = 10_000_000_000  # A span that another process exports may end this long after the root of its run.


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is an export or a span."""
    return "resourceSpans" in value or _is_span(value)


def _is_span(value: object) -> bool:
    return isinstance(value, dict) and ({"traceId", "spanId"} <= set(value) or _is_of_console(value))


def _is_of_console(span: dict[str, Any]) -> bool:
    return isinstance(span.get("context"), dict) and "trace_id" in span["context"]


def records(source: Node) -> list[Node]:
    """Return the spans of an export, or of a list of exports."""
    spans: list[Node] = []
    for export in source.each():
        if _is_span(export.value):
            spans.append(_span_of_console(export) if _is_of_console(export.value) else export)
            continue
        resources = export.at("resourceSpans")
        if resources.value is None:
            raise resources.refusal("expected the list that an export of spans has")
        for resource in resources.items():
            around = {"resource": resource.at("resource").value}
            within = (span for scope in resource.at("scopeSpans").items() for span in scope.at("spans").items())
            spans += (span._replace(value=around | span.value) if isinstance(span.value, dict) else span for span in within)
    return spans


def _span_of_console(span: Node) -> Node:
    parts = {"traceId": ("context", "trace_id"), "spanId": ("context", "span_id"), "parentSpanId": ("parent_id",)}
    fields: dict[str, Any] = {key: span.at(*path).text().removeprefix("0x") for key, path in parts.items()}
    for key, path in (("startTimeUnixNano", "start_time"), ("endTimeUnixNano", "end_time")):
        fields[key] = microseconds(span.at(path)) * 1_000
    code, message = f"STATUS_CODE_{span.at('status', 'status_code').text()}", span.at("status", "description").value
    fields["status"] = {"code": code, "message": message}
    own = {"context", "parent_id", "start_time", "end_time"}
    return span._replace(value={key: value for key, value in span.object().items() if key not in own} | fields)


def starts(span: Node) -> int:
    """Return when a span began, in nanoseconds since 1970; 0 for a future time, by which all other runs would end."""
    began_ns = _integer(span.at("startTimeUnixNano"))
    return began_ns if began_ns <= time.time_ns() else 0


def ends(spans: Sequence[Node]) -> int | None:
    """Return when a run is complete, in nanoseconds since 1970; None unless its newest span is a root that has ended."""
    end = spans[-1].at("endTimeUnixNano")
    return None if spans[-1].at("parentSpanId").text() or end.value is None else _integer(end) + _LATE_NS


def run_id(span: Node) -> str:
    """Return the trace id of a span."""
    return span.at("traceId").required_text().lower()


def run(own_id: str, nodes: Sequence[Node]) -> Run:
    """Make a run of the spans of one trace id."""
    transcript = Transcript()
    spans = [_span(node, transcript) for node in nodes]
    first = min(spans, key=lambda span: span.started_ns)
    described = next((span for span in spans if not span.parent_id), first).node
    record = described.object() | {"attributes": _attributes_of(described).value}
    if described.object().get("resource") is not None:
        record["resource"] = _attributes_of(described.at("resource")).value
    run_id = trace_id("otel", own_id, [node.value for node in nodes])
    return run_of(first.node, run_id, spans, first.started_ns // 1_000, record)


def _span(node: Node, transcript: Transcript) -> Span:
    attributes = _attributes_of(node)
    is_genai = any(key in attributes.value for key in _GENAI)
    named_kind = attributes.at(_GENAI[0] if is_genai else "openinference.span.kind").text()
    # A span that has messages and no operation is a call of a model.
    kind = KINDS.get(named_kind, "model" if is_genai and not named_kind else "other")
    name = ""
    if not is_genai and kind == "other":
        # In the AI SDK and in OpenLLMetry, no attribute states the kind of every span.
        is_tool = "ai.toolCall.name" in attributes.value or attributes.at("traceloop.span.kind").value == "tool"
        is_model = any(key.startswith(_MODEL_ATTRIBUTES) for key in attributes.value)
        kind = "tool" if is_tool else "model" if is_model else kind
    if kind == "tool":
        named = attributes.first("gen_ai.tool.name", "ai.toolCall.name", "traceloop.entity.name", "tool.name")
        name = named.text() or (named if is_genai else node.at("name")).required_text()
        call_id = attributes.first("gen_ai.tool.call.id", "ai.toolCall.id", "tool.id").text()
        arguments = attributes.first("gen_ai.tool.call.arguments", "ai.toolCall.args", "traceloop.entity.input", "input.value")
        inputs = [Piece(node, "call", name=name, arguments=arguments.value, call_id=call_id)]
        outputs = _results_of(node, attributes)
    else:
        inputs = _pieces(attributes, "input", "user", kind, transcript)
        outputs = _pieces(attributes, "output", "agent", kind, Transcript())
    ids, end = (node.at("spanId").text(), node.at("parentSpanId").text()), node.at("endTimeUnixNano")
    times_ns = _integer(node.at("startTimeUnixNano")), None if end.value is None else _integer(end)
    return Span(node, *ids, *times_ns, kind, name, inputs, outputs, _is_failed(node))


def _pieces(attributes: Node, direction: str, speaker: Speaker, kind: SpanKind, transcript: Transcript) -> list[Piece]:
    """Return the pieces in the messages of an input or output, or else in its value."""
    # Messages may be structured, or a text of JSON.
    structured = transcript.pieces(attributes.at(f"gen_ai.{direction}.messages").parsed()) or []
    flat = [piece for message in _messages(attributes, direction) for piece in pieces_of_message(message)]
    if pieces := [*structured, *flat]:
        return pieces
    value = attributes.first(f"{direction}.value", *_VALUES[direction])
    if direction == "output" and attributes.first("ai.response.text", "ai.response.toolCalls").value is not None:
        message = {key: attributes.value.get(f"ai.response.{key}") for key in ("text", "toolCalls")}
        value = value._replace(value={"role": "assistant"} | message)
    in_value = pieces_in(value.parsed(), speaker, transcript, is_model=kind == "model")
    # An input of a model without messages is the rest of a request: settings, for example.
    return in_value if in_value is not None else [] if kind == "model" else utterance(value, speaker, text_in(value.value))


def _messages(attributes: Node, direction: str) -> Iterator[Node]:
    """Yield the messages of OpenInference and OpenLLMetry, whose attributes are paths: ``llm.input_messages.0.message``."""
    for key in (f"llm.{direction}_messages", "gen_ai.prompt" if direction == "input" else "gen_ai.completion"):
        own = [path for path in attributes.value if path.startswith(f"{key}.")]
        paths = {path.removeprefix(f"{key}."): attributes.at(path).value for path in own}
        items = _nested({path: value for path, value in paths.items() if path.count(".") < MOST_DEPTH})
        for number, item in enumerate(items if isinstance(items, list) else []):
            place = attributes._replace(path=f"{attributes.path}.{key}.{number}", value=item)
            message = place.at("message") if "message" in place.object() else place
            fields = {"role": "assistant"} | message.object() if direction == "output" else dict(message.object())
            fields["tool_calls"] = [call.get("tool_call", call) for call in objects_in(fields.get("tool_calls"))]
            # Calls may be among the contents too.
            contents = objects_in(fields.pop("contents", None))
            blocks = [each if "tool_call" in each else each.get("message_content") for each in contents]
            fields.setdefault("content", [each for each in objects_in(blocks) if {"tool_call", "text"} & set(each)])
            if name := fields.get("function_call_name"):
                fields["function_call"] = {"name": name, "arguments": fields.get("function_call_arguments_json")}
            yield message._replace(value=fields)


def _nested(paths: dict[str, Any]) -> Any:
    """Return the object that paths and their values describe; a list if the paths begin with numbers."""
    groups: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for path, value in paths.items():
        key, _, inner_path = path.partition(".")
        groups[key][inner_path] = value
    items = {key: inner[""] if "" in inner else _nested(inner) for key, inner in groups.items()}
    is_list = bool(items) and all(key.isascii() and key.isdigit() and len(key) < 10 for key in items)
    return [items[key] for key in sorted(items, key=int)] if is_list else items


def _attributes_of(holder: Node) -> Node:
    pairs = holder.at("attributes")
    if isinstance(pairs.value, dict):
        return pairs
    return pairs._replace(value={pair.at("key").required_text(): _any_value(pair.at("value")) for pair in pairs.items()})


def _results_of(span: Node, attributes: Node) -> list[Piece]:
    has_failed = _is_failed(span) or attributes.at("error.type").value is not None
    returned = attributes.first("gen_ai.tool.call.result", "ai.toolCall.result", "traceloop.entity.output", "output.value")
    text = text_in(returned.value) or (_failure_of(span) if has_failed else "")
    return [Piece(span, "result", text, is_error=has_failed)] if text or has_failed else []


def _is_failed(span: Node) -> bool:
    return span.at("status", "code").value in _ERROR


def _failure_of(span: Node) -> str:
    if message := span.at("status", "message").text():
        return message
    raised = (event for event in span.at("events").items() if event.at("name").value == "exception")
    return next(filter(None, (_attributes_of(event).at("exception.message").text() for event in raised)), "")


def _any_value(node: Node) -> Any:
    """Return a value as JSON. Each of its seven kinds has a name of its own; a value without any is null."""
    kind = next(iter(node.object()), None) if node.value is not None else None
    match kind:
        case None:
            return None
        case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
            return node.at(kind).value
        case "intValue":
            return _integer(node.at(kind), "an integer of 64 bits", sign="-")
        case "arrayValue":
            return [_any_value(item) for item in node.at(kind, "values").items()]
        case "kvlistValue":
            return {pair.at("key").text(): _any_value(pair.at("value")) for pair in node.at(kind, "values").items()}
    raise node.refusal("expected a value with its kind: stringValue, intValue and the like")


def _integer(node: Node, expected: str = "nanoseconds since 1970", sign: str = "") -> int:
    text = str(node.value) if isinstance(node.value, str | int) else ""
    digits = text.removeprefix(sign)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
        raise node.refusal(f"expected {expected}")
    return int(text)


FORMAT = Format(fits, run, records, run_id, starts, ends)
