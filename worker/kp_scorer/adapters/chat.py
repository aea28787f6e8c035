"""Chat messages as OpenAI's Chat Completions have them, which others have taken over: a role, a content, calls of tools."""

from collections.abc import Iterable, Iterator
from typing import Final

from kp_scorer.adapters.pieces import Asked, Called, Piece, Returned, Said, content_text, spoken, text_in
from kp_scorer.adapters.source import Node

_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")


def is_message(value: object) -> bool:
    """Whether a value is a chat message, as far as one can tell."""
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def is_message_for_sure(value: object) -> bool:
    """Whether a value is a chat message where it may be anything: it has a known role, and a content of a message, or calls."""
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    if "content" in value:
        return value["content"] is None or isinstance(value["content"], str | list)
    return isinstance(value.get("tool_calls"), list)


def pieces_of(messages: Iterable[Node]) -> Iterator[Piece]:
    """What a list of messages says; raises NotConverted, as :func:`pieces_of_message` does."""
    for message in messages:
        yield from pieces_of_message(message)


def pieces_of_message(message: Node) -> Iterator[Piece]:
    """What a message says. Instructions, of the system or the developer, are no part of a run.

    Raises:
        NotConverted: it is no message, or has another role.
    """
    role, content = message.at("role"), message.at("content")
    match role.required_text():
        case "system" | "developer":
            return
        case "user":
            yield from spoken(Asked, message, content_text(content))
        case "assistant":
            yield from spoken(Said, message, content_text(content) or message.at("refusal").text())
            yield from _calls(message)
        case "tool" | "function":
            yield Returned(message, text_in(content.value), message.at("tool_call_id").text(), message.at("name").text())
        case _:
            raise role.refusal("expected " + ", ".join(_ROLES[:-1]) + f" or {_ROLES[-1]}")


def _calls(message: Node) -> Iterator[Piece]:
    for call in message.at("tool_calls").items():
        call_id = call.at("id").text()
        if call.at("custom").value is not None:
            yield called(call, call.at("custom"), "input", call_id)
        else:
            yield called(call, call.at("function"), "arguments", call_id)
    # What calls of tools were before there could be several.
    if (legacy := message.at("function_call")).value is not None:
        yield called(legacy, legacy, "arguments", "")


def called(node: Node, function: Node, arguments: str, call_id: str) -> Called:
    """The call of a function that has a ``name``, and its arguments under another key."""
    return Called(node, function.at("name").required_text(), function.at(arguments).value, call_id)
