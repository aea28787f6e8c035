"""The messages of a run, whatever format records them: roles, blocks of content, calls of tools and what those return.

One reader serves them all: messages of Chat Completions, items of the Responses API, and messages with parts, as the GenAI
conventions have them. Each format only leads to its messages.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.node import Node, as_json, parsed

_ERROR: Final = re.compile(
    r"\s*(?:Traceback \(most recent call last\)|(?:[\w.]*(?:Error|Exception)|(?i:error|exception))\b[^\n:]{0,60}:)"
)
_ERROR_KEYS: Final = ("error", "isError", "is_error")
_NO_TEXT: Final = ("computer_screenshot", "image_url", "input_image", "input_audio")
"""Types of blocks that are an image or a sound, which may be a result alone."""
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_ARGUMENTS: Final = {
    "function_call": "arguments",
    "mcp_call": "arguments",
    "tool_call": "arguments",
    "custom_tool_call": "input",
    "server_tool_call": "server_tool_call",
}
"""Types of blocks that are a call with a name, and where its arguments are; others that end in ``_call`` are built in."""
_RESULTS: Final = {
    # Before it was called ``response`` it was called ``result``.
    "tool_call_response": ("response", "result"),
    "server_tool_call_response": ("server_tool_call_response",),
}
_BESIDE_A_CALL: Final = frozenset({"id", "call_id", "type", "status", "caller", "namespace"})
"""Fields that are no arguments of a built-in tool."""


class Piece(NamedTuple):
    """What happens in a run: the user asks, the agent says something or calls a tool, the tool returns something."""

    node: Node
    kind: Literal["user", "agent", "call", "result"]
    text: str = ""
    """Of a call: the call as the agent wrote it, where it wrote one."""
    name: str = ""
    """Of the tool."""
    arguments: Any = None
    """As the format has them: JSON, or a text that mostly is."""
    call_id: str = ""
    latency_ms: float | None = None
    is_error: bool = False
    """Whether the format says that a result is an error."""


class Transcript:
    """Reads lists of messages of which each may begin with the one before: what was read is not read again."""

    def __init__(self, read: Callable[[Node], Iterable[Piece]]) -> None:
        """``read`` yields the pieces in a message."""
        self._read = read
        self._messages: list[Any] = []
        self._pieces: list[Piece] = []

    def read_before(self, messages: Node) -> int:
        """How many of the first messages of a list were read before: all of the list before, or none."""
        count = len(self._messages)
        return count if isinstance(messages.value, list) and messages.value[:count] == self._messages else 0

    def pieces(self, messages: Node) -> list[Piece]:
        """The pieces in a list of messages."""
        start = self.read_before(messages)
        new = [piece for message in messages.items(start) for piece in self._read(message)]
        pieces = self._pieces + new if start else new
        if pieces:
            self._messages, self._pieces = messages.value, pieces
        return pieces


def pieces_of(items: Iterable[Node]) -> Iterator[Piece]:
    """The pieces in messages and in items that stand beside messages, and are blocks of one each."""
    for item in items:
        yield from pieces_of_message(item) if is_message(item.value) else _pieces_of_block(item)


def pieces_of_message(message: Node) -> Iterator[Piece]:
    """The pieces in a message, which must have a role. Instructions, of the system or the developer, are no part of a run."""
    role, parts = message.at("role"), message.at("parts")
    content = message.at("content") if parts.value is None else parts
    match role.required_text():
        case "system" | "developer":
            return
        case "user":
            yield from _pieces_of_content(message, "user", content)
        case "assistant":
            is_refused = content.value in (None, "", [])
            yield from _pieces_of_content(message, "agent", message.at("refusal") if is_refused else content)
            for call in message.at("tool_calls").items():
                yield _function_call(call)
            # The form before a message could have several calls.
            if (legacy := message.at("function_call")).value is not None:
                yield _call(legacy, legacy, "arguments", "")
        case "tool" if parts.value is not None:
            yield from _pieces_of_content(message, "result", parts)
        case "tool" | "function":
            call_id, name = message.at("tool_call_id").text(), message.at("name").text()
            yield Piece(message, "result", text_in(content.value), name, call_id=call_id)
        case _:
            raise role.refusal("expected " + ", ".join(_ROLES[:-1]) + f" or {_ROLES[-1]}")


def utterance(node: Node, kind: Literal["user", "agent", "result"], text: str) -> list[Piece]:
    """A text of the user or the agent, unless it is blank."""
    return [Piece(node, kind, text)] if text.strip() else []


def _pieces_of_content(message: Node, kind: Literal["user", "agent", "result"], content: Node) -> Iterator[Piece]:
    """The pieces in a text, or in a list of blocks, where texts are one with nothing but images between them."""
    if not isinstance(content.value, list):
        if content.value is not None and not isinstance(content.value, str):
            raise content.refusal("expected a text or a list of parts")
        yield from utterance(message, kind, content.text())
        return
    texts: list[str] = []
    for block in content.items():
        if (text := _text_of_block(block.value)) is not None:
            texts.append(text)
        elif pieces := list(_pieces_of_block(block)):
            yield from utterance(message, kind, "\n".join(filter(None, texts)))
            yield from pieces
            texts.clear()
    yield from utterance(message, kind, "\n".join(filter(None, texts)))


def _pieces_of_block(block: Node) -> Iterator[Piece]:
    """The pieces in a block that is no text: a thought, a call or a result; nothing in others."""
    kind, call_id = block.at("type").required_text(), block.first("call_id", "id").text()
    if kind == "reasoning":
        thoughts = (text_in(block.at(key).value) for key in ("summary", "content", "text") if block.at(key).value)
        yield from utterance(block, "agent", "\n".join(thoughts))
    elif kind in _ARGUMENTS:
        yield _call(block, block, _ARGUMENTS[kind], call_id)
    elif kind in _RESULTS:
        yield Piece(block, "result", text_in(block.first(*_RESULTS[kind]).value), call_id=call_id)
    elif kind.endswith("_call_output"):
        yield Piece(block, "result", text_in(block.at("output").value), call_id=call_id)
    elif kind.endswith("_call"):
        yield Piece(block, "call", name=kind.removesuffix("_call"), arguments=_own_fields(block, kind), call_id=call_id)
    if kind == "mcp_call" and (returned := block.first("error", "output")).value is not None:
        is_error = block.at("error").value is not None
        yield Piece(block, "result", text_in(returned.value), call_id=call_id, is_error=is_error)


def _function_call(call: Node) -> Piece:
    is_custom = call.at("custom").value is not None
    function, arguments = ("custom", "input") if is_custom else ("function", "arguments")
    return _call(call, call.at(function), arguments, call.at("id").text())


def _call(node: Node, function: Node, key: str, call_id: str) -> Piece:
    name = function.at("name").required_text()
    return Piece(node, "call", name=name, arguments=function.at(key).value, call_id=call_id)


def _own_fields(item: Node, kind: str) -> dict[str, Any]:
    """The fields of a call of one of OpenAI's own tools, without the images that some make."""
    fields = {key: value for key, value in item.object().items() if key not in _BESIDE_A_CALL}
    if kind == "image_generation_call":
        fields.pop("result", None)
    elif kind == "code_interpreter_call" and isinstance(outputs := fields.get("outputs"), list):
        fields["outputs"] = [each for each in outputs if not (isinstance(each, dict) and each.get("type") == "image")]
    return fields


def _text_of_block(block: object) -> str | None:
    """The text of a block; None if it is none, or is something else beside it."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or block.get("type") == "reasoning":
        return None
    keys = ("text", "refusal", "content") if block.get("type") == "text" else ("text", "refusal")
    return next((text for key in keys if isinstance(text := block.get(key), str)), None)


def text_in(value: object) -> str:
    """A result as a text: the texts of a list of blocks one a line, nothing of an image or a sound, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(block, dict) and "type" in block for block in value):
        return "\n".join(text for block in value if (text := _text_of_block(block)))
    is_without_text = value is None or (isinstance(value, dict) and value.get("type") in _NO_TEXT)
    return "" if is_without_text else as_json(value)


def is_message(value: object) -> bool:
    """Whether a value is a chat message, as far as one can tell."""
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def is_message_for_sure(value: object) -> bool:
    """Whether a value that may be anything is a chat message: it has one of the roles, and a message's content, or calls."""
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    if "content" in value:
        return value["content"] is None or isinstance(value["content"], str | list)
    return isinstance(value.get("tool_calls"), list)


def is_error(result: Piece) -> bool:
    """Whether a result is an error, as ``worker/CONVERT.md`` defines it."""
    if result.is_error or _ERROR.match(result.text):
        return True
    content = parsed(result.text)
    return isinstance(content, dict) and any(content.get(key) for key in _ERROR_KEYS)


def call_input(call: Piece) -> dict[str, Any] | None:
    """A call's arguments as an object; anything else becomes the ``arguments`` of one."""
    content = parsed(call.arguments)
    if content is None or isinstance(content, dict):
        return content
    return {"arguments": content} if content != "" else {}


def call_text(call: Piece) -> str:
    """A call as a text: as the agent wrote it, or the tool's name with its arguments in brackets."""
    if call.text:
        return call.text
    arguments = parsed(call.arguments)
    arguments_text = arguments if isinstance(arguments, str) else "" if arguments is None else as_json(arguments)
    return f"{call.name}({arguments_text})"
