"""Reads the spans of a run: the kind of each, its tool, its inputs and outputs. Messages may be in attributes and in events."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final, Literal, NamedTuple

from kp_scorer.adapters.attributes import attributes_of, integer, messages_of_paths, normalized_id, value_of, values_of
from kp_scorer.adapters.blocks import returned_in, text_in
from kp_scorer.adapters.messages import Transcript, pieces_in, pieces_of
from kp_scorer.adapters.node import Node, as_json, parsed, unwrapped
from kp_scorer.adapters.pieces import Piece, has_kind, utterance
from kp_scorer.adapters.roles import Speaker
from kp_scorer.errors import NotConverted

OWN_KIND: Final = "row.kind"  # ``span_of_row`` gives this attribute to spans that were rows of a store's table.
_ERROR: Final = (2, "STATUS_CODE_ERROR", "ERROR")
_EVENT: Final = re.compile(r"gen_ai\.(system|user|assistant|tool|unknown)\.message|gen_ai\.(choice|unknown)")
_ACTS: Final = re.compile(r"function_?(?:call|response)|tool_?(?:call|use|result)\b", re.IGNORECASE)
"""Matches in the JSON of a request or an answer that may hold calls."""
_TOOL_SPAN: Final = re.compile(r"(?:(?:execute|running|call)[_ ])?(?:tool|function)[ :.]+(['\"]?)([\w./-]+)\1", re.IGNORECASE)
_METHOD: Final = re.compile(r"\.(?:__call__|a?call|a?run|a?invoke|forward|execute)$")
_HANDOFF: Final = re.compile(r"handoff(?: from .+)? to (.+)", re.IGNORECASE)
_NOTHING: Final = ("", "{}", "null", "None")

SpanKind = Literal["model", "tool", "event", "agent", "other"]

_KINDS: Final[dict[str, SpanKind]] = {  # The kinds of spans, by the names that conventions give to kinds and operations.
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


class Spans:
    """Reads the spans of a run into ``all``, in their order. A message that cannot be read is left out; the run is not."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        """Read spans in the form of OpenTelemetry's protocol. One without a kind is a tool's if a model called that tool."""
        self.unreadable: list[NotConverted] = []  # The reasons for leaving messages out.
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
            taken = [
                *values_of(attributes, "arguments"),
                *values_of(attributes, "input"),
                *(each.at("content") for each in prompted),
            ]
            arguments = unwrapped(taken[0].value, are_arguments=True) if taken else None
            call_id = text_in(value_of(attributes, "call id").value)
            inputs = [Piece(node, "call", name=name, arguments=arguments, call_id=call_id)]
            outputs = _results_of(node, attributes, answered)
            if called and name not in called and not arguments and all(piece.text in _NOTHING for piece in outputs):
                # The span surrounds the calls of a turn, or is a handoff, which the model calls by another name.
                kind, inputs, outputs = "other", [], []
        elif kind == "event":
            texts = (text_in(each.value) for each in values_of(attributes, "input"))
            inputs, outputs = [], _results_of(node, attributes, answered) or utterance(node, "result", next(texts, ""))
        else:
            inputs = self._pieces(attributes, "input", "user", kind, prompted, self._transcript)
            outputs = self._pieces(attributes, "output", "agent", kind, answered, Transcript())
        ids, end = (normalized_id(node.at("spanId")), normalized_id(node.at("parentSpanId"))), node.at("endTimeUnixNano")
        times_ns = integer(node.at("startTimeUnixNano")), None if end.value is None else integer(end)
        return Span(node, *ids, *times_ns, kind, name if kind == "tool" else "", inputs, outputs, _is_failed(node))

    def _pieces(
        self, attributes: Node, direction: str, speaker: Speaker, kind: SpanKind, events: Sequence[Node], transcript: Transcript
    ) -> list[Piece]:
        """Return the pieces in the messages of an input or output, or else in its value."""
        # Exporters record messages as structures, or as a text of JSON.
        messages = attributes.at(f"gen_ai.{direction}.messages").parsed()
        pieces = self._structured(messages, speaker, transcript)
        if pieces := pieces or _joined(self._each([*events, *messages_of_paths(attributes, direction)])):
            if _has_acts(pieces):
                return pieces
            # The messages of some exporters lack the calls.
            texts = (each for each in values_of(attributes, direction) if _ACTS.search(text_in(each.value)))
            wholes = (self._pieces_of_value(each, speaker, kind, Transcript()) for each in texts)
            return next(filter(_has_acts, wholes), pieces)
        values = values_of(attributes, direction)
        if direction == "output" and any(
            attributes.at(f"ai.response.{key}").value is not None for key in ("text", "toolCalls")
        ):
            fields = {"reasoning_content": "reasoning", "text": "text", "toolCalls": "toolCalls"}
            message = {field: attributes.at(f"ai.response.{key}").value for field, key in fields.items()}
            values = [attributes._replace(value={"role": "assistant"} | message)]
        readings = (self._pieces_of_value(value, speaker, kind, transcript) for value in values)
        return next(filter(None, readings), [])

    def _structured(self, messages: Node, speaker: Speaker, transcript: Transcript) -> list[Piece]:
        """Return the pieces in messages, which may all be one text."""
        if isinstance(messages.value, str):
            return utterance(messages, speaker, messages.value)
        try:
            return transcript.pieces(messages) or []
        except NotConverted:
            return self._each(messages.each())

    def _each(self, messages: Sequence[Node]) -> list[Piece]:
        messages = [message._replace(value=parsed(message.value)) for message in messages]
        return list(pieces_of([message for message in messages if self._check_readable(message)]))

    def _check_readable(self, message: Node) -> bool:
        """Return whether a message can be read; note it as skipped otherwise."""
        try:
            list(pieces_of([message]))
        except NotConverted as error:
            message.skip()
            self.unreadable.append(error)
            return False
        return True

    def _pieces_of_value(self, value: Node, speaker: Speaker, kind: SpanKind, transcript: Transcript) -> list[Piece]:
        content = value._replace(value=unwrapped(value.value))
        if content.value == "null" or (kind == "model" and content.value == "None"):
            # Exporters that record messages as texts write None for an answer that has only calls.
            return []
        try:
            in_value = pieces_in(content, speaker, transcript, is_model=kind == "model")
        except NotConverted:
            holder = content.at("messages") if isinstance(content.value, dict) else content
            in_value = self._each(holder.each())
        if in_value is None and (kind, speaker) == ("model", "user"):
            # The value is another part of a request: settings, for example.
            return []
        return utterance(value, speaker, text_in(value.value)) if in_value is None else in_value


def _kind(attributes: Node) -> SpanKind:
    named = values_of(attributes, "kind")
    kinds = [_KINDS.get(text_in(each.value).strip('"').lower(), "other") for each in named]
    kind: SpanKind = next((kind for kind in kinds if kind != "other"), "other")
    has_tool = any(key in attributes.value for key in ("gen_ai.tool.name", "tool.name", "ai.toolCall.name"))
    if kind == "tool" != kinds[0] and OWN_KIND in attributes.value and not has_tool:
        # Trust the store, which knows better whether a span is a tool's.
        return "other"
    if kind == "other" and has_tool:
        return "tool"
    # A span that names no operation, but a model or its messages, is a call of the model.
    return "model" if kind == "other" and not named and values_of(attributes, "model") else kind


def _tool_name(node: Node, attributes: Node) -> str:
    name = value_of(attributes, "tool").value or attributes.at("name").value or node.at("name").value
    name = name if isinstance(name, str) else ""
    if handoff := _HANDOFF.fullmatch(name):
        # The model calls a function of this name for a handoff.
        return f"transfer_to_{re.sub(r'[^a-z0-9]+', '_', handoff[1].lower())}"
    return _METHOD.sub("", _TOOL_SPAN.sub(r"\2", name))


def _events(node: Node, attributes: Node) -> tuple[list[Node], list[Node], Node]:
    """Return the messages to the model and those of its answer in the events of a span, and all attributes.

    The attributes are the span's, with those of GenAI's other events.
    """
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
    # If no event is an answer, the last messages of the model are the answer.
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
    """Join pieces if each of them is a token of an answer; otherwise return them unchanged."""
    are_tokens = all(piece.kind == "agent" for piece in pieces) and any(piece.text[:1] == " " for piece in pieces[1:])
    return [pieces[0]._replace(text="".join(piece.text for piece in pieces))] if are_tokens else pieces


def _has_acts(pieces: Sequence[Piece]) -> bool:
    return has_kind(pieces, "call", "result")


def _results_of(span: Node, attributes: Node, answered: Sequence[Node]) -> list[Piece]:
    has_failed = _is_failed(span) or any(
        text_in(each.value).lower() not in ("ok", "success", "default", "debug", "warning")
        for each in values_of(attributes, "failed")
    )
    contents = (each.at("content") for each in answered)
    returned = next(
        iter([*values_of(attributes, "result"), *values_of(attributes, "output"), *contents]),
        attributes._replace(value=None),
    )
    content = unwrapped(returned.value)
    text, is_error = returned_in(content)
    if isinstance(returned.value, str) and content == parsed(returned.value):
        # Keep the JSON as the source writes it.
        text = text if text != as_json(content) else returned.value
    has_failed = has_failed or is_error
    if text in _NOTHING:
        text = _failure_of(span, attributes) if has_failed else text if text == "{}" else ""
    return [Piece(span, "result", text, is_error=has_failed)] if text or has_failed else []


def _is_failed(span: Node) -> bool:
    return span.at("status", "code").value in _ERROR


def _failure_of(span: Node, attributes: Node) -> str:
    message = span.at("status", "message").text() or text_in(value_of(attributes, "failure").value)
    raised = (event for event in span.at("events").items() if event.at("name").value == "exception")
    texts = (attributes_of(event).at("exception.message").text() for event in raised)
    return message or next(filter(None, texts), "")
