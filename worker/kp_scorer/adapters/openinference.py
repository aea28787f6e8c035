"""What a span of OpenInference tells: attributes whose keys are paths, such as ``llm.input_messages.0.message.role``."""

from collections.abc import Iterator
from typing import Any, Final

from kp_scorer.adapters.chat import pieces_of_message
from kp_scorer.adapters.otlp import Attributes, call_of, results_of
from kp_scorer.adapters.pieces import Asked, Piece, Said, spoken, text_in
from kp_scorer.adapters.source import Node
from kp_scorer.adapters.timeline import Kind, Told

_KINDS: Final[dict[str, Kind]] = {"LLM": "model", "TOOL": "tool", "RETRIEVER": "tool"}
_MOST_KEYS: Final = 12
"""In a path: the longest of a message has nine."""


def told(span: Node, attributes: Attributes) -> Told:
    """What a span tells.

    Raises:
        NotConverted: its messages, or what it says of a tool, are not as the conventions have them.
    """
    kind = _KINDS.get(attributes.at("openinference.span.kind").text(), "other")
    given, gave = attributes.at("input.value"), attributes.at("output.value")
    if kind == "tool":
        name = attributes.at("tool.name").text() or span.at("name").required_text()
        call = call_of(span, name, attributes.at("tool.id").text(), given)
        return Told("tool", name, [call], results_of(span, attributes, gave))
    shown = list(_messages(attributes, "llm.input_messages")) or _values(Asked, given, kind)
    made = list(_messages(attributes, "llm.output_messages")) or _values(Said, gave, kind)
    return Told(kind, "", shown, made)


def _values(role: type[Asked] | type[Said], value: Node, kind: Kind) -> list[Piece]:
    """What the value of a span says if it has no messages; of a model, JSON would be the request or the answer as a whole."""
    if kind == "model" and not isinstance(value.parsed().value, str):
        return []
    return list(spoken(role, value, text_in(value.value)))


def _messages(attributes: Attributes, key: str) -> Iterator[Piece]:
    for number, item in _list(_tree(attributes, key)):
        node = attributes.at(f"{key}.{number}.message")
        yield from pieces_of_message(node._replace(value=_message(_dict(item.get("message")))))


def _message(found: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI has it."""
    contents = [_dict(item.get("message_content")) for _, item in _list(found.get("contents"))]
    calls = [_dict(item.get("tool_call")) for _, item in _list(found.get("tool_calls"))]
    # The calls may stand among the contents too, where their order matters.
    calls = calls or [_dict(item.get("tool_call")) for _, item in _list(found.get("contents")) if "tool_call" in item]
    message = {
        "role": found.get("role"),
        "content": found.get("content", contents or None),
        "tool_call_id": found.get("tool_call_id"),
        "name": found.get("name"),
        "tool_calls": calls,
    }
    if "function_call_name" in found:
        arguments = found.get("function_call_arguments_json")
        message["function_call"] = {"name": found["function_call_name"], "arguments": arguments}
    return message


def _tree(attributes: Attributes, key: str) -> dict[str, Any]:
    """What the attributes below a key say, as objects in objects: lists are objects whose keys are numbers."""
    tree: dict[str, Any] = {}
    for path, value in attributes.values.items():
        if not path.startswith(f"{key}."):
            continue
        *outer, last = path.removeprefix(f"{key}.").split(".")[:_MOST_KEYS]
        holder = tree
        for name in outer:
            holder = holder.setdefault(name, {}) if isinstance(holder.get(name, {}), dict) else {}
        holder[last] = value
    return tree


def _list(tree: object) -> list[tuple[int, dict[str, Any]]]:
    """The items of a list, with their numbers, in their order."""
    numbered = [
        (int(key), _dict(item)) for key, item in _dict(tree).items() if key.isascii() and key.isdigit() and len(key) < 10
    ]
    return sorted(numbered, key=lambda each: each[0])


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
