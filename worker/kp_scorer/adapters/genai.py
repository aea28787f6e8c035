"""What a span of the GenAI semantic conventions tells: ``gen_ai.*``, with messages as a role and parts."""

from collections.abc import Iterable, Iterator
from typing import Final

from kp_scorer.adapters.chat import pieces_of_message
from kp_scorer.adapters.otlp import Attributes, call_of, results_of
from kp_scorer.adapters.pieces import Asked, Called, Piece, Returned, Said, spoken, text_in
from kp_scorer.adapters.source import Node
from kp_scorer.adapters.timeline import Kind, Told

_OPERATION: Final = "gen_ai.operation.name"
_INPUT: Final = "gen_ai.input.messages"
_OUTPUT: Final = "gen_ai.output.messages"
_MODEL: Final = frozenset({"chat", "generate_content", "text_completion"})
_TOOL: Final = "execute_tool"


def is_told(attributes: Attributes) -> bool:
    """Whether a span is one of these conventions."""
    return any(key in attributes.values for key in (_OPERATION, _INPUT, _OUTPUT))


def told(span: Node, attributes: Attributes) -> Told:
    """What a span tells.

    Raises:
        NotConverted: its messages, or what it says of a tool, are not as the conventions have them.
    """
    operation = attributes.at(_OPERATION).text()
    if operation == _TOOL:
        name, call_id = attributes.at("gen_ai.tool.name").required_text(), attributes.at("gen_ai.tool.call.id").text()
        call = call_of(span, name, call_id, attributes.at("gen_ai.tool.call.arguments"))
        return Told("tool", name, [call], results_of(span, attributes, attributes.at("gen_ai.tool.call.result")))
    # Who records messages and no operation means a call of a model.
    kind: Kind = "model" if not operation or operation in _MODEL else "other"
    return Told(kind, "", list(_messages(attributes.at(_INPUT))), list(_messages(attributes.at(_OUTPUT))))


def _messages(attribute: Node) -> Iterator[Piece]:
    # It may be structured, or JSON in a text.
    for message in attribute.parsed().items():
        if message.at("parts").value is None and message.at("content").value is not None:
            # Some record what they send to OpenAI as it is.
            yield from pieces_of_message(message)
        elif (role := message.at("role").required_text()) not in ("system", "developer"):
            for part in message.at("parts").items():
                yield from _part(part, role)


def _part(part: Node, role: str) -> Iterable[Piece]:
    """What a part of a message says: parts that are no text, thought, call nor result of one say nothing."""
    call_id = part.at("id").text()
    match part.at("type").required_text():
        case "text" | "reasoning" if role == "tool":
            return [Returned(part, part.at("content").text())]
        case "text" | "reasoning":
            return spoken(Said if role == "assistant" else Asked, part, part.at("content").text())
        case "tool_call":
            return [Called(part, part.at("name").required_text(), part.at("arguments").value, call_id)]
        case "tool_call_response":
            # Its text was called ``result`` before it was called ``response``.
            return [Returned(part, text_in(part.first("response", "result").value), call_id)]
        case "server_tool_call":
            return [Called(part, part.at("name").required_text(), part.at("server_tool_call").value, call_id)]
        case "server_tool_call_response":
            return [Returned(part, text_in(part.at("server_tool_call_response").value), call_id)]
    return []
