"""One span of a run, and what its attributes and events mean in any dialect: its kind, its tool, what went in and came out.

Attributes are known by the ends of their names, which ``_MEANINGS`` has: those of the conventions of GenAI and OpenInference,
and of many exporters. Messages may be in events as well.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ specifies ``gen_ai.*``,
https://arize-ai.github.io/openinference/spec/semantic_conventions.html OpenInference.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.blocks import Piece, returned_in, text_in, utterance
from kp_scorer.adapters.messages import Transcript, pieces_in, pieces_of
from kp_scorer.adapters.node import MOST_DEPTH, Node, as_json, objects_in, opened, parsed
from kp_scorer.adapters.roles import Speaker
from kp_scorer.errors import NotConverted

SERVICE: Final = "service.name"  # The attribute of a resource that names the agent.
OWN_KIND: Final = "row.kind"  # The attribute that rows of stores get.
_MOST_DIGITS: Final = 19  # A number of 64 bits has at most this many. It is a text, as numbers in JSON are less exact.
_ERROR: Final = (2, "STATUS_CODE_ERROR", "ERROR")
_MEANINGS: Final = {  # What attributes mean whose names end so. Of several, the first in this order counts.
    "kind": (r"row\.kind", r"gen_ai\.operation\.name", r"span\.kind", r"span\.?type", r"observation\.type", r"subtype"),
    "tool": (r"gen_ai\.tool\.name", r"toolCall\.name", r"tool\.name", r"traceloop\.entity\.name"),
    "call id": (r"tool\.call\.id", r"toolCall\.id", r"tool\.(?:call_)?id"),
    "arguments": (r"tool\.(?:call\.)?arguments", r"toolCall\.args", r"tool\.args", r"tool_arguments", r"tool_call_args"),
    "result": (r"tool\.call\.result", r"toolCall\.result", r"tool_response", r"tool\.(?:output|result)"),
    "input": (
        r"input\.value",
        r"prompt\.messages",
        r"(?:span)?inputs?",
        "prompt",
        "llm_request",
        "crew_tasks",
        r"task\.description",
    ),
    "output": (r"output\.value", r"response\.object", r"(?:span)?outputs?", "completion", "llm_response"),
    "failure": (r"error\.message", r"status_message"),
    "failed": (r"error\.type", r"error\.message", r"observation\.level", r"tool\.status"),
    "model": (
        r"request\.model",
        r"llm\.model_name",
        r"prompt\.messages",
        r"gen_ai\.(?:(?:prompt|completion)\..*|(?:in|out)put\.messages)",
    ),
}
_ENDS: Final = {
    name: [re.compile(rf"(?!.*token)(?:.*[._:])?{end}", re.IGNORECASE) for end in ends] for name, ends in _MEANINGS.items()
}
_EVENT: Final = re.compile(r"gen_ai\.(system|user|assistant|tool|unknown)\.message|gen_ai\.(choice|unknown)")
_ACTS: Final = re.compile(r"function_?(?:call|response)|tool_?(?:call|use|result)\b", re.IGNORECASE)
"""Matches in the JSON of a request or an answer that may hold calls."""
_TOOL_SPAN: Final = re.compile(r"(?:(?:execute|running|call)[_ ])?(?:tool|function)[ :.]+(['\"]?)([\w./-]+)\1", re.IGNORECASE)
_METHOD: Final = re.compile(r"\.(?:__call__|a?call|a?run|a?invoke|forward|execute)$")
_HANDOFF: Final = re.compile(r"handoff(?: from .+)? to (.+)", re.IGNORECASE)
_REDACTED: Final = "__REDACTED__"  # OpenInference's, in place of what is not to be recorded.
_NOTHING: Final = ("", "{}", "null", "None")
_FRAMEWORKS: Final = {
    "gcp.vertex.agent": "google-adk",
    "ai": "ai-sdk",
    "gen_ai": "ai-sdk",
    "agent_framework": "agent-framework",
}
_SCOPE: Final = re.compile(r"(?:.*\binstrumentation\.|logfire\.|ai\.|@)?([\w -]+?)(?:_v\d+|-sdk)?(?:[./].*)?")
_SWITCHES: Final = {  # The variable that records messages, by the beginning of the name of an instrumentation.
    "openinference": "OPENINFERENCE_HIDE_INPUTS=false and OPENINFERENCE_HIDE_OUTPUTS=false",
    "semantic_kernel": "SEMANTICKERNEL_EXPERIMENTAL_GENAI_ENABLE_OTEL_DIAGNOSTICS_SENSITIVE=true",
    "agent_framework": "ENABLE_SENSITIVE_DATA=true",
    "pydantic-ai": "include_content in InstrumentationSettings",
    "": "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY (older versions: true), or the switch of the framework",
}

SpanKind = Literal["model", "tool", "event", "agent", "other"]

_KINDS: Final[dict[str, SpanKind]] = {  # By the names that conventions have for kinds of spans and for operations.
    **dict.fromkeys("generation llm chat chat_model generate_content text_completion completion".split(), "model"),  # noqa: SIM905
    **dict.fromkeys(("model", "model_generation", "model_step", "model_inference"), "model"),
    **dict.fromkeys(("tool", "tool_call", "mcp_tool_call", "retriever", "execute_tool", "function"), "tool"),
    **dict.fromkeys(("agent", "agent_run", "invoke_agent", "invoke_workflow", "workflow", "flow"), "agent"),
    "event": "event",
}


class Span(NamedTuple):
    """One span, or observation, of a run. Times are nanoseconds since 1970."""

    node: Node
    span_id: str
    parent_id: str
    started_ns: int
    ended_ns: int | None
    kind: SpanKind
    name: str  # The tool's name; empty for other spans.
    inputs: Sequence[Piece]  # The call of a tool; the conversation so far of a model; the input of another span.
    outputs: Sequence[Piece]  # The result of a tool; the answer of a model; the output of another span.
    has_failed: bool = False


def kind_of(name: str) -> SpanKind:
    """Return the kind of a span by the name that its convention has for it."""
    return _KINDS.get(name.strip('"').lower(), "other")


@lru_cache(maxsize=4_096)
def _rank(meaning: str, attribute: str) -> int | None:
    """Return the place of an attribute among those of a meaning; None if it has another one."""
    return next((rank for rank, end in enumerate(_ENDS[meaning]) if end.fullmatch(attribute)), None)


def _of(attributes: Node, meaning: str) -> list[Node]:
    """Return the attributes with a meaning that hold something, the first in their order first."""
    ranks = {key: rank for key in attributes.value if (rank := _rank(meaning, key)) is not None}
    nodes = (attributes.at(key) for key in sorted(ranks, key=ranks.__getitem__))
    return [node for node in nodes if isinstance(node.value, str | list | dict) and node.value not in ("", [])]


def _first(attributes: Node, meaning: str) -> Node:
    return next(iter(_of(attributes, meaning)), attributes._replace(value=None))


class Spans:
    """The spans of a run, read. A message that cannot be read is left out, not the run."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        """Read spans in the form of OpenTelemetry's protocol. One without a kind is a tool's if a model called its name."""
        self.odd: list[NotConverted] = []  # Why messages are left out.
        self._transcript = Transcript()
        spans = list(map(self._span, nodes))
        models = [span for span in spans if span.kind == "model"]
        called = {piece.name for span in models for piece in (*span.inputs, *span.outputs) if piece.kind == "call"}
        self.all = [self._span(span.node, called) if span.kind in ("agent", "other", "tool") else span for span in spans]

    def _span(self, node: Node, called: Collection[str] = ()) -> Span:
        prompted, answered, attributes = _events(node, attributes_of(node))
        kind, name = _kind(attributes), _tool_name(node, attributes)
        if name in called and kind == "other":
            kind = "tool"
        if kind == "tool":
            name = name or node.at("name").required_text()
            taken = [*_of(attributes, "arguments"), *_of(attributes, "input"), *(each.at("content") for each in prompted)]
            arguments = opened(taken[0].value, are_arguments=True) if taken else None
            call_id = text_in(_first(attributes, "call id").value)
            inputs = [Piece(node, "call", name=name, arguments=arguments, call_id=call_id)]
            outputs = _results_of(node, attributes, answered)
            if called and name not in called and not arguments and all(piece.text in _NOTHING for piece in outputs):
                # It surrounds the calls of a turn, or is a handoff, which the model calls by another name.
                kind, inputs, outputs = "other", [], []
        elif kind == "event":
            texts = (text_in(each.value) for each in _of(attributes, "input"))
            inputs, outputs = [], _results_of(node, attributes, answered) or utterance(node, "result", next(texts, ""))
        else:
            inputs = self._pieces(attributes, "input", "user", kind, prompted, self._transcript)
            outputs = self._pieces(attributes, "output", "agent", kind, answered, Transcript())
        ids, end = (own_id_in(node.at("spanId")), own_id_in(node.at("parentSpanId"))), node.at("endTimeUnixNano")
        times_ns = integer(node.at("startTimeUnixNano")), None if end.value is None else integer(end)
        return Span(node, *ids, *times_ns, kind, name if kind == "tool" else "", inputs, outputs, _is_failed(node))

    def _pieces(
        self, attributes: Node, direction: str, speaker: Speaker, kind: SpanKind, events: Sequence[Node], transcript: Transcript
    ) -> list[Piece]:
        """Return the pieces in the messages of an input or output, or else in its value."""
        # Messages may be structured, or a text of JSON.
        messages = attributes.at(f"gen_ai.{direction}.messages").parsed()
        pieces = self._structured(messages, speaker, transcript)
        if pieces := pieces or _joined(self._each([*events, *_messages(attributes, direction)])):
            if _has_acts(pieces):
                return pieces
            # The messages of some exporters lack the calls.
            texts = (each for each in _of(attributes, direction) if _ACTS.search(text_in(each.value)))
            wholes = (self._pieces_of_value(each, speaker, kind, Transcript()) for each in texts)
            return next(filter(_has_acts, wholes), pieces)
        values = _of(attributes, direction)
        if direction == "output" and any(
            attributes.at(f"ai.response.{key}").value is not None for key in ("text", "toolCalls")
        ):
            keys = {"reasoning": "reasoning_content", "text": "text", "toolCalls": "toolCalls"}
            message = {own: attributes.at(f"ai.response.{key}").value for key, own in keys.items()}
            values = [attributes._replace(value={"role": "assistant"} | message)]
        readings = (self._pieces_of_value(value, speaker, kind, transcript) for value in values)
        return next(filter(None, readings), [])

    def _structured(self, messages: Node, speaker: Speaker, transcript: Transcript) -> list[Piece]:
        """Return the pieces in messages that may be a text of them all."""
        if isinstance(messages.value, str):
            return utterance(messages, speaker, messages.value)
        try:
            return transcript.pieces(messages) or []
        except NotConverted:
            return self._each(messages.each())

    def _each(self, messages: Sequence[Node]) -> list[Piece]:
        messages = [message._replace(value=parsed(message.value)) for message in messages]
        return list(pieces_of([message for message in messages if self._is_readable(message)]))

    def _is_readable(self, message: Node) -> bool:
        try:
            list(pieces_of([message]))
        except NotConverted as error:
            message.skip()
            self.odd.append(error)
            return False
        return True

    def _pieces_of_value(self, value: Node, speaker: Speaker, kind: SpanKind, transcript: Transcript) -> list[Piece]:
        content = value._replace(value=opened(value.value))
        if content.value == "null" or (kind == "model" and content.value == "None"):
            # Exporters that record messages as texts write the latter for an answer of calls alone.
            return []
        try:
            in_value = pieces_in(content, speaker, transcript, is_model=kind == "model")
        except NotConverted:
            holder = content.at("messages") if isinstance(content.value, dict) else content
            in_value = self._each(holder.each())
        if in_value is None and (kind, speaker) == ("model", "user"):
            # It is the rest of a request: settings, for example.
            return []
        return utterance(value, speaker, text_in(value.value)) if in_value is None else in_value


def _kind(attributes: Node) -> SpanKind:
    named = _of(attributes, "kind")
    kinds = [kind_of(text_in(each.value)) for each in named]
    kind: SpanKind = next((kind for kind in kinds if kind != "other"), "other")
    has_tool = any(key in attributes.value for key in ("gen_ai.tool.name", "tool.name", "ai.toolCall.name"))
    if kind == "tool" != kinds[0] and OWN_KIND in attributes.value and not has_tool:
        # A store knows better which spans are those of tools.
        return "other"
    if kind == "other" and has_tool:
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
    events += [(event.at("name").value, attributes_of(event)) for event in node.at("events").items()]
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


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Return pieces, as one if each is a token of an answer."""
    are_tokens = all(piece.kind == "agent" for piece in pieces) and any(piece.text[:1] == " " for piece in pieces[1:])
    return [pieces[0]._replace(text="".join(piece.text for piece in pieces))] if are_tokens else pieces


def _has_acts(pieces: Sequence[Piece]) -> bool:
    return any(piece.kind in ("call", "result") for piece in pieces)


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


def attributes_of(holder: Node) -> Node:
    """Return the attributes of a span, a resource or an event as an object. OTLP has them as pairs."""
    pairs = holder.at("attributes")
    if isinstance(pairs.value, dict):
        return pairs
    values = {pair.at("key").required_text(): any_value(pair.at("value")) for pair in pairs.items()}
    return pairs._replace(value={key: value for key, value in values.items() if value != _REDACTED})


def attributes_of_run(spans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the attributes of a run in OTLP's JSON: the root's win over other spans', and a span's over its resource's."""
    root_last = sorted(spans, key=lambda span: not span.get("parentSpanId"))
    pairs = (pair for span in root_last for pair in span["attributes"] if isinstance(pair, dict))
    values = {str(pair.get("key")): pair.get("value") for pair in pairs}
    return {key: next(iter(value.values()), None) for key, value in values.items() if isinstance(value, dict)}


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
    texts = (attributes_of(event).at("exception.message").text() for event in raised)
    return message or next(filter(None, texts), "")


def any_value(node: Node) -> Any:
    """Return a value as JSON. Each of its seven kinds has a name of its own; a value without any is null."""
    kind = next(iter(node.object()), None) if node.value is not None else None
    match kind:
        case None:
            return None
        case "stringValue" | "boolValue" | "doubleValue" | "bytesValue":
            return node.at(kind).value
        case "intValue":
            return integer(node.at(kind), "an integer of 64 bits", sign="-")
        case "arrayValue":
            return [any_value(item) for item in node.at(kind, "values").items()]
        case "kvlistValue":
            return {pair.at("key").text(): any_value(pair.at("value")) for pair in node.at(kind, "values").items()}
    raise node.refusal("expected a value with its kind: stringValue, intValue and the like")


def integer(node: Node, expected: str = "nanoseconds since 1970", sign: str = "") -> int:
    """Return an integer of 64 bits, which may be a text."""
    text = str(node.value) if isinstance(node.value, str | int) else ""
    digits = text.removeprefix(sign)
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS):
        raise node.refusal(f"expected {expected}")
    return int(text)


def own_id_in(node: Node) -> str:
    """Return an id. In hexadecimal its case means nothing; in base64, as Protobuf's own JSON has bytes, it does."""
    return text if (text := node.text()).endswith("=") else text.lower()


def framework_of(spans: Iterable[Span]) -> str | None:
    """Return the name of the framework whose spans of agents, or else of models or tools, come first."""
    ranks = {"agent": 0, "model": 1, "tool": 2}
    named = [span for span in spans if span.kind in ranks and _scope(span.node)]
    span = min(named, key=lambda span: (ranks[span.kind], span.started_ns), default=None)
    name = _SCOPE.fullmatch(_scope(span.node)) if span else None
    return _FRAMEWORKS.get(name[0], name[1]) if name else None


def _scope(span: Node) -> str:
    name = span.at("scope", "name").value if isinstance(span.at("scope").value, dict) else None
    return name if isinstance(name, str) else ""


def without_content(span: Node) -> str:
    """Return what is expected of the instrumentation of a span that has no messages."""
    resource = span.at("resource")
    service = resource.value and attributes_of(resource).value.get(SERVICE)
    switch = next(variable for prefix, variable in _SWITCHES.items() if _scope(span).startswith(prefix))
    return f"expected messages, which {_scope(span) or 'the instrumentation'} in {service} does not record: set {switch}"
