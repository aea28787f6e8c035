"""Spans of OpenTelemetry, by the conventions of GenAI and OpenInference and by the dialects of many exporters.

A source is an export in the JSON of the protocol (``resourceSpans``, ``resourceLogs``), which the Collector's file exporter
writes too; a span that the console exporter of Python's SDK prints; or an answer of Tempo, Jaeger or Zipkin. All spans of one
trace id are one run. A status of Ok means little, as many frameworks set it wherever nothing was raised.

Dialects are in ``_MEANINGS``: what attributes mean by the ends of their names. Messages may be in events as well.

Specifications: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding for the form,
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ for ``gen_ai.*``,
https://arize-ai.github.io/openinference/spec/semantic_conventions.html for OpenInference.
"""

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from kp_scorer.adapters.blocks import Piece, returned_in, text_in, utterance
from kp_scorer.adapters.building import Run, microseconds, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import Transcript, pieces_in, pieces_of
from kp_scorer.adapters.node import MOST_DEPTH, Node, as_json, objects_in, opened, parsed
from kp_scorer.adapters.roles import Speaker
from kp_scorer.adapters.timeline import Span, SpanKind, kind_of, run_of
from kp_scorer.errors import NotConverted, NotRecorded, Problem

_MOST_DIGITS: Final = 19  # A number of 64 bits has at most this many. It is a text, as numbers in JSON are less exact.
_ERROR: Final = (2, "STATUS_CODE_ERROR", "ERROR")
_MEANINGS: Final = {  # What attributes mean whose names end so. Of several, the first in this order counts.
    "kind": (r"gen_ai\.operation\.name", r"span\.kind", r"span\.?type", r"observation\.type", r"subtype"),
    "tool": (r"gen_ai\.tool\.name", r"toolCall\.name", r"tool\.name", r"traceloop\.entity\.name"),
    "call id": (r"tool\.call\.id", r"toolCall\.id", r"tool\.(?:call_)?id"),
    "arguments": (r"tool\.(?:call\.)?arguments", r"toolCall\.args", r"tool\.args", r"tool_arguments", r"tool_call_args"),
    "result": (r"tool\.call\.result", r"toolCall\.result", r"tool_response", r"tool\.(?:output|result)"),
    "input": (
        r"input\.value",
        r"prompt\.messages",
        r"inputs?",
        r"spaninputs",
        r"prompt",
        r"llm_request",
        r"crew_tasks",
        r"task\.description",
    ),
    "output": (r"output\.value", r"response\.object", r"outputs?", r"spanoutputs", r"completion", r"llm_response"),
    "failure": (r"error\.message", r"status_message"),
    "failed": (r"error\.type", r"error\.message", r"observation\.level", r"tool\.status"),
    "model": (
        r"request\.model",
        r"llm\.model_name",
        r"prompt\.messages",
        r"gen_ai\.(?:(?:prompt|completion)\..*|(?:in|out)put\.messages)",
    ),
}
_ENDS: Final = {name: [re.compile(rf"(?:.*[._:])?{end}", re.IGNORECASE) for end in ends] for name, ends in _MEANINGS.items()}
_EVENT: Final = re.compile(r"gen_ai\.(system|user|assistant|tool|unknown)\.message|gen_ai\.(choice|unknown)")
_ACTS: Final = re.compile(r"function_?(?:call|response)|tool_?(?:call|use|result)\b", re.IGNORECASE)
"""Matches in the JSON of a request or an answer that may hold calls."""
_TOOL_SPAN: Final = re.compile(r"(?:(?:execute|running|call)[_ ])?(?:tool|function)[ :.]+(['\"]?)([\w./-]+)\1", re.IGNORECASE)
_METHOD: Final = re.compile(r"\.(?:__call__|a?call|a?run|a?invoke|forward|execute)$")
_HANDOFF: Final = re.compile(r"handoff(?: from .+)? to (.+)", re.IGNORECASE)
_REDACTED: Final = "__REDACTED__"  # OpenInference's, in place of what is not to be recorded.
_NOTHING: Final = ("", "{}", "null", "None")
_IS_LOG: Final = "isLog"
_LATE_NS: Final = 10_000_000_000  # A span that another process exports may end this long after the root of its run.
_OPEN_NS: Final = 900_000_000_000  # A run waits this long for spans that others show to exist.
_FRAMEWORKS: Final = {"gcp": "google-adk", "ai": "ai-sdk", "agent_framework": "agent-framework"}
_SCOPE: Final = re.compile(r"(?:.*\binstrumentation\.|logfire\.|@)?([\w -]+?)(?:_v\d+|-sdk)?(?:[./].*)?")
_SWITCHES: Final = {  # The variable that records messages, by the beginning of the name of an instrumentation.
    "openinference": "OPENINFERENCE_HIDE_INPUTS=false and OPENINFERENCE_HIDE_OUTPUTS=false",
    "semantic_kernel": "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE=true",
    "agent_framework": "ENABLE_SENSITIVE_DATA=true",
    "pydantic-ai": "include_content in InstrumentationSettings",
    "": "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=true, or the switch of the framework",
}


_ROOTS: Final = ("openinference", "llm", "gen_ai", "input", "output", "tool", "traceloop")
"""The beginnings of paths of attributes."""


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is an export or a span."""
    pages = objects_in(value.get("data")) or [value]
    is_export = any(
        isinstance(holder, dict) and {"resourceSpans", "resourceLogs", "batches"} & set(holder)
        for holder in (value, value.get("trace"))
    )
    return is_export or _is_span(value) or all("traceID" in page and "spans" in page for page in pages)


def _is_span(value: object) -> bool:
    return isinstance(value, dict) and ({"traceId", "spanId"} <= set(value) or _is_of_console(value) or _is_of_zipkin(value))


def _is_of_console(span: dict[str, Any]) -> bool:
    return isinstance(span.get("context"), dict) and "trace_id" in span["context"]


def _is_of_zipkin(span: dict[str, Any]) -> bool:
    return {"traceId", "id", "duration"} <= set(span)


def records(source: Node) -> list[Node]:
    """Return the spans of an export, or of a list of exports."""
    spans: list[Node] = []
    for export in source.each():
        if _is_span(export.value):
            read = _span_of_console if _is_of_console(export.value) else _span_of_zipkin if "id" in export.value else None
            spans.append(read(export) if read else export)
            continue
        if any("traceID" in page for page in objects_in(export.at("data").value)) or "traceID" in export.object():
            spans += [
                _span_of_jaeger(span, page)
                for page in (export.at("data").items() or [export])
                for span in page.at("spans").items()
            ]
            continue
        if export.at("resourceLogs").value is not None:
            logs = (
                scope.at("logRecords")
                for resource in export.at("resourceLogs").items()
                for scope in resource.at("scopeLogs").items()
            )
            spans += [_event_of_log(log) for each in logs for log in each.items()]
            continue
        holder = export if export.at("trace").value is None else export.at("trace")
        resources = holder.first("resourceSpans", "batches")
        if resources.value is None:
            raise resources.refusal("expected the list that an export of spans has")
        for resource in resources.items():
            for scope in resource.at("scopeSpans").items():
                around = {"resource": resource.at("resource").value, "scope": {"name": scope.at("scope", "name").value}}
                within = scope.at("spans").items()
                within = [
                    _event_of_log(span) if isinstance(span.value, dict) and "body" in span.value else span for span in within
                ]
                spans += (span._replace(value=around | span.value) if isinstance(span.value, dict) else span for span in within)
    return spans


def _span_of_console(span: Node) -> Node:
    parts = {"traceId": ("context", "trace_id"), "spanId": ("context", "span_id"), "parentSpanId": ("parent_id",)}
    fields: dict[str, Any] = {key: span.at(*path).text().removeprefix("0x") for key, path in parts.items()}
    for key, path in (("startTimeUnixNano", "start_time"), ("endTimeUnixNano", "end_time")):
        fields[key] = None if path == "end_time" and span.at(path).value is None else microseconds(span.at(path)) * 1_000
    code, message = f"STATUS_CODE_{span.at('status', 'status_code').text()}", span.at("status", "description").value
    fields["status"] = {"code": code, "message": message}
    fields["attributes"] = flat(span.at("attributes").value)
    own = {"context", "parent_id", "start_time", "end_time"}
    return span._replace(value={key: value for key, value in span.object().items() if key not in own} | fields)


def flat(attributes: Any) -> Any:
    """Return attributes by their paths, of which some stores make objects and lists."""
    if not isinstance(attributes, dict) or not any(isinstance(each, dict | list) for each in attributes.values()):
        return attributes
    paths: dict[str, Any] = {}
    for key, value in attributes.items():
        is_path = isinstance(value, dict) and key in _ROOTS
        if not is_path and not (key.startswith("llm.") and objects_in(value)):
            paths[key] = value
            continue
        for inner, each in _flat_items(value):
            paths[f"{key}.{inner}"] = each
    return paths


def _flat_items(value: Any) -> Iterator[tuple[str, Any]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, dict) or objects_in(each):
            yield from ((f"{key}.{inner}", item) for inner, item in _flat_items(each))
        else:
            yield str(key), each


def _span_of_zipkin(span: Node) -> Node:
    fields = {"spanId": span.at("id").value, "parentSpanId": span.at("parentId").value}
    return span._replace(value=span.object() | fields | _times(span, "timestamp") | _tagged(span.at("tags").object()))


def _span_of_jaeger(span: Node, page: Node) -> Node:
    parents = [each.get("spanID") for each in objects_in(span.at("references").value) if each.get("refType") == "CHILD_OF"]
    ids = {"traceId": span.at("traceID").value, "spanId": span.at("spanID").value, "parentSpanId": next(iter(parents), None)}
    tags, process = _by_key(span.at("tags")), ("processes", span.at("processID").text())
    named = {"name": span.at("operationName").value, "scope": {"name": tags.get("otel.scope.name")}}
    logs = [_by_key(log.at("fields")) for log in span.at("logs").items()]
    events = [{"name": fields.pop("event", ""), "attributes": fields} for fields in logs]
    resource = {"attributes": _by_key(page.at(*process, "tags")) | {"service.name": page.at(*process, "serviceName").value}}
    own = ids | named | {"events": events, "resource": resource}
    return span._replace(value=own | _times(span, "startTime") | _tagged(tags))


def _by_key(pairs: Node) -> dict[str, Any]:
    return {pair.at("key").required_text(): pair.at("value").value for pair in pairs.items()}


def _times(span: Node, start: str) -> dict[str, Any]:
    start_us, duration_us = (_integer(span.at(key), "microseconds") for key in (start, "duration"))
    return {"startTimeUnixNano": start_us * 1_000, "endTimeUnixNano": (start_us + duration_us) * 1_000}


def _tagged(tags: dict[str, Any]) -> dict[str, Any]:
    code = "ERROR" if tags.get("error") not in (None, False, "false") else tags.get("otel.status_code")
    return {"attributes": tags, "status": {"code": code, "message": tags.get("otel.status_description")}}


def _event_of_log(log: Node) -> Node:
    """Return a record of a log as an event of the span during which it was written."""
    body, attributes = parsed(_any_value(log.at("body"))), _attributes_of(log).object()
    named = {"name": log.at("eventName").text() or attributes.get("event.name")}
    event = named | {"attributes": attributes | (body if isinstance(body, dict) else {})}
    ids = {"traceId": log.at("traceId").value, "parentSpanId": log.first("parentSpanId", "spanId").value}
    time_ns = log.first("timeUnixNano", "observedTimeUnixNano").value
    return log._replace(value=event | ids | {_IS_LOG: True, "startTimeUnixNano": time_ns})


def starts(span: Node) -> int:
    """Return when a span began, in nanoseconds since 1970; 0 for a future time, by which all other runs would end."""
    began_ns = _integer(span.at("startTimeUnixNano"))
    return began_ns if began_ns <= time.time_ns() else 0


def ends(spans: Sequence[Node]) -> int | None:
    """Return when a run is complete, in nanoseconds since 1970; None unless its newest span is a root that has ended."""
    end = spans[-1].at("endTimeUnixNano")
    return None if spans[-1].at("parentSpanId").text() or end.value is None else _integer(end) + _LATE_NS


def waits(spans: Sequence[Node], now_ns: int) -> int | None:
    """Return until when a run waits, if spans are still to come: all but the root, or one that has others within it."""
    ids = {_id(span.at("spanId")) for span in spans}
    parents = {parent for span in spans if (parent := _id(span.at("parentSpanId")))}
    is_complete = parents <= ids and (len(spans) != 1 or _span(spans[0], _Reading()).inputs)
    newest_ns = max((_integer(span.at("startTimeUnixNano")) for span in spans), default=0)
    return None if is_complete or now_ns > newest_ns + _OPEN_NS else now_ns + _LATE_NS


def run_id(span: Node) -> str:
    """Return the trace id of a span."""
    span.at("traceId").required_text()
    return _id(span.at("traceId"))


def _id(node: Node) -> str:
    """Return an id. In hexadecimal its case means nothing; in base64, as Protobuf's own JSON has bytes, it does."""
    return text if (text := node.text()).endswith("=") else text.lower()


def run(own_id: str, nodes: Sequence[Node]) -> Run | list[Run]:
    """Make a run of the spans of one trace id; none if none of them is an agent's."""
    # A span may be exported twice: when it begins and when it ends, for example.
    latest = {_id(node.at("spanId")): node for node in nodes if node.at("spanId").value}
    for log in (node for node in nodes if _IS_LOG in node.object()):
        if span := latest.get(_id(log.at("parentSpanId"))):
            latest[_id(span.at("spanId"))] = span._replace(
                value=span.object() | {"events": [*(span.value.get("events") or ()), log.value]}
            )
    reading = _Reading()
    spans = [_span(node, reading) for node in latest.values()]
    models = [span for span in spans if span.kind == "model"]
    called = {piece.name for span in models for piece in (*span.inputs, *span.outputs) if piece.kind == "call"}
    spans = [_span(span.node, reading, called) if span.kind == "other" else span for span in spans]
    if not spans:
        return []
    first = min(spans, key=lambda span: span.started_ns)
    if not any(piece.kind in ("user", "agent") for span in spans for piece in (*span.inputs, *span.outputs)):
        if reading.odd:
            raise reading.odd[0]
        agents = [*models, *(span for span in spans if span.kind == "agent")]
        if not agents:
            return []
        raise NotRecorded(first.node.line, [Problem(agents[0].node.path, _without_content(agents[0].node))])
    described = next((span for span in spans if not span.parent_id), first).node
    record = described.object() | {"attributes": _attributes_of(described).value}
    if described.object().get("resource") is not None:
        record["resource"] = _attributes_of(described.at("resource")).value
    run_id = trace_id("otel", own_id, [node.value for node in nodes])
    return run_of(first.node, run_id, spans, first.started_ns // 1_000, record, _framework(spans))


def _framework(spans: Sequence[Span]) -> str | None:
    """Return the name of the framework whose spans of agents, or else of models or tools, come first."""
    ranks = {"agent": 0, "model": 1, "tool": 2}
    named = [span for span in spans if span.kind in ranks and _scope(span.node)]
    span = min(named, key=lambda span: (ranks[span.kind], span.started_ns), default=None)
    name = _SCOPE.fullmatch(_scope(span.node)) if span else None
    return _FRAMEWORKS.get(name[1], name[1]) if name else None


def _scope(span: Node) -> str:
    return span.at("scope", "name").text()


def _without_content(span: Node) -> str:
    resource = span.at("resource")
    service = resource.value and _attributes_of(resource).value.get("service.name")
    switch = next(variable for prefix, variable in _SWITCHES.items() if _scope(span).startswith(prefix))
    return f"expected messages, which {_scope(span) or 'the instrumentation'} in {service} does not record: set {switch}"


@lru_cache(maxsize=4_096)
def _rank(meaning: str, attribute: str) -> int | None:
    """Return the place of an attribute among those of a meaning; None if it has another one."""
    return next((rank for rank, end in enumerate(_ENDS[meaning]) if end.fullmatch(attribute)), None)


def _of(attributes: Node, meaning: str) -> list[Node]:
    """Return the attributes with a meaning that hold something, the first in their order first."""
    ranks = {key: rank for key in attributes.value if (rank := _rank(meaning, key)) is not None}
    nodes = (attributes.at(key) for key in sorted(ranks, key=ranks.__getitem__))
    return [node for node in nodes if isinstance(node.value, str | list | dict) and node.value]


def _first(attributes: Node, meaning: str) -> Node:
    return next(iter(_of(attributes, meaning)), attributes._replace(value=None))


def _span(node: Node, reading: "_Reading", called: Collection[str] = ()) -> Span:
    """Return a span. One without a kind is that of a tool if a model called one of its name."""
    prompted, answered, attributes = _events(node, _attributes_of(node))
    kind, name = _kind(attributes), _tool_name(node, attributes)
    kind = "tool" if kind == "other" and name in called else kind
    if kind == "tool":
        name = name or node.at("name").required_text()
        taken = [*_of(attributes, "arguments"), *_of(attributes, "input"), *(each.at("content") for each in prompted)]
        arguments = opened(taken[0].value, are_arguments=True) if taken else None
        inputs = [Piece(node, "call", name=name, arguments=arguments, call_id=text_in(_first(attributes, "call id").value))]
        outputs = _results_of(node, attributes, answered)
    else:
        name = ""
        inputs = _pieces(attributes, "input", "user", kind, prompted, reading, reading.transcript)
        outputs = _pieces(attributes, "output", "agent", kind, answered, reading, Transcript())
    ids, end = (_id(node.at("spanId")), _id(node.at("parentSpanId"))), node.at("endTimeUnixNano")
    times_ns = _integer(node.at("startTimeUnixNano")), None if end.value is None else _integer(end)
    return Span(node, *ids, *times_ns, kind, name, inputs, outputs, _is_failed(node))


def _kind(attributes: Node) -> SpanKind:
    named = _of(attributes, "kind")
    kinds = (kind_of(text_in(each.value)) for each in named)
    kind: SpanKind = next((kind for kind in kinds if kind != "other"), "other")
    if kind == "other" and any(key in attributes.value for key in ("gen_ai.tool.name", "tool.name", "ai.toolCall.name")):
        return "tool"
    # A span that has a model or its messages, and no operation, is a call of that.
    return "model" if kind == "other" and not named and _of(attributes, "model") else kind


def _tool_name(node: Node, attributes: Node) -> str:
    name = _first(attributes, "tool").value or attributes.at("name").value or node.at("name").value
    name = name if isinstance(name, str) else ""
    if handoff := _HANDOFF.fullmatch(name):
        # The model calls it by the name of a function.
        return f"transfer_to_{re.sub(r'[^a-z0-9]+', '_', handoff[1].lower())}"
    return _METHOD.sub("", _TOOL_SPAN.sub(r"\2", name))


def _events(node: Node, attributes: Node) -> tuple[list[Node], list[Node], Node]:
    """Return the messages in the events of a span: those to the model, its answer; and its attributes with those of others."""
    prompted: list[Node] = []
    answered: list[Node] = []
    listed = attributes.at("events").parsed()
    events = [(item.at("event.name").value, item) for item in (listed.items() if isinstance(listed.value, list) else ())]
    events += [(event.at("name").value, _attributes_of(event)) for event in node.at("events").items()]
    for name, fields in events:
        if match := _EVENT.fullmatch(str(name)):
            (answered if match[2] == "choice" else prompted).append(_message_of(fields, match[1] or "assistant"))
        elif str(name).startswith("gen_ai."):
            attributes = attributes._replace(value=fields.object() | attributes.object())
    has_answer = bool(answered)
    # Without an event of its own, the answer is what the model says last.
    while not has_answer and prompted and prompted[-1].object().get("role", "assistant") == "assistant":
        answered.insert(0, prompted.pop())
    return prompted, answered, attributes


def _message_of(event: Node, role: str) -> Node:
    fields = event.object()
    if isinstance(item := fields.get("data"), dict) and "type" in item:
        return event._replace(value=item)
    if isinstance(content := parsed(fields.get("gen_ai.event.content")), dict):
        fields = content
    if "message" in fields:
        inner = parsed(fields["message"])
        fields = inner if isinstance(inner, dict) else {"content": inner}
    return event._replace(value={"role": role} | fields)


def _pieces(
    attributes: Node,
    direction: str,
    speaker: Speaker,
    kind: SpanKind,
    events: Sequence[Node],
    reading: "_Reading",
    transcript: Transcript,
) -> list[Piece]:
    """Return the pieces in the messages of an input or output, or else in its value."""
    # Messages may be structured, or a text of JSON.
    messages = attributes.at(f"gen_ai.{direction}.messages").parsed()
    pieces = reading.structured(messages, speaker, transcript)
    if pieces := pieces or reading.each([*events, *_messages(attributes, direction)]):
        texts = [] if _has_acts(pieces) else [each for each in _of(attributes, direction) if _ACTS.search(text_in(each.value))]
        # The messages of some exporters lack the calls.
        wholes = (_pieces_of_value(each, speaker, kind, Transcript(), reading) for each in texts)
        return next(filter(_has_acts, wholes), pieces)
    values = _of(attributes, direction)
    if direction == "output" and any(attributes.at(f"ai.response.{key}").value is not None for key in ("text", "toolCalls")):
        keys = {"reasoning": "reasoning_content", "text": "text", "toolCalls": "toolCalls"}
        message = {own: attributes.at(f"ai.response.{key}").value for key, own in keys.items()}
        values = [attributes._replace(value={"role": "assistant"} | message)]
    readings = (_pieces_of_value(value, speaker, kind, transcript, reading) for value in values)
    return next(filter(None, readings), [])


def _has_acts(pieces: Sequence[Piece]) -> bool:
    return any(piece.kind in ("call", "result") for piece in pieces)


class _Reading:
    """Reads the messages of a run. One that cannot be read is left out, not the run."""

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.odd: list[NotConverted] = []  # Why messages are left out.

    def structured(self, messages: Node, speaker: Speaker, transcript: Transcript) -> list[Piece]:
        """Return the pieces in messages that may be a text of them all."""
        if isinstance(messages.value, str):
            return utterance(messages, speaker, messages.value)
        try:
            return transcript.pieces(messages) or []
        except NotConverted:
            return self.each(messages.each())

    def each(self, messages: Sequence[Node]) -> list[Piece]:
        """Return the pieces in messages."""
        messages = [message._replace(value=parsed(message.value)) for message in messages]
        readable = [message for message in messages if self._is_readable(message)]
        return list(pieces_of(readable))

    def _is_readable(self, message: Node) -> bool:
        try:
            list(pieces_of([message]))
        except NotConverted as error:
            message.skip()
            self.odd.append(error)
            return False
        return True


def _pieces_of_value(value: Node, speaker: Speaker, kind: SpanKind, transcript: Transcript, reading: _Reading) -> list[Piece]:
    content = value._replace(value=opened(value.value))
    try:
        in_value = pieces_in(content, speaker, transcript, is_model=kind == "model")
    except NotConverted:
        holder = content.at("messages") if isinstance(content.value, dict) else content
        in_value = reading.each(holder.each())
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
    values = {pair.at("key").required_text(): _any_value(pair.at("value")) for pair in pairs.items()}
    return pairs._replace(value={key: value for key, value in values.items() if value != _REDACTED})


def _results_of(span: Node, attributes: Node, answered: Sequence[Node]) -> list[Piece]:
    has_failed = _is_failed(span) or any(
        text_in(each.value).lower() not in ("ok", "success", "default", "debug", "warning")
        for each in _of(attributes, "failed")
    )
    contents = (each.at("content") for each in answered)
    returned = next(iter([*_of(attributes, "result"), *_of(attributes, "output"), *contents]), attributes._replace(value=None))
    content = opened(returned.value)
    text, is_error = returned_in(content)
    if isinstance(returned.value, str) and content == parsed(returned.value):
        # Keep the spelling of the source.
        text = text if text != as_json(content) else returned.value
    has_failed = has_failed or is_error
    if text in _NOTHING:
        text = _failure_of(span, attributes) if has_failed else text if text == "{}" else ""
    return [Piece(span, "result", text, is_error=has_failed)] if text or has_failed else []


def _is_failed(span: Node) -> bool:
    return span.at("status", "code").value in _ERROR


def _failure_of(span: Node, attributes: Node) -> str:
    message = span.at("status", "message").text() or text_in(_first(attributes, "failure").value)
    raised = (event for event in span.at("events").items() if event.at("name").value == "exception")
    texts = (_attributes_of(event).at("exception.message").text() for event in raised)
    return message or next(filter(None, texts), "")


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


FORMAT = Format(fits, run, records, run_id, starts, ends, waits)
