"""The messages of a run, whatever records them: roles, blocks of content, calls of tools and what those return.

One reader serves all formats, by the shapes that messages have: OpenAI's chats and items of the Responses API, Anthropic's
blocks, Gemini's contents, messages of LangChain and AutoGen, parts of the AI SDK, of Bedrock and of the GenAI conventions.
Each format only leads to what a model or an agent got and put out.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.node import Node, as_json, parsed
from kp_scorer.errors import NotConverted

Speaker = Literal["user", "agent", "result"]

_ERROR: Final = re.compile(
    r"\s*(?:Traceback \(most recent call last\)|(?:[\w.]*(?:Error|Exception)|(?i:error|exception))\b[^\n:]{0,60}:)"
)
_ERROR_KEYS: Final = ("error", "isError", "is_error")
_MEDIA_TYPES: Final = ("computer_screenshot", "image", "image_url", "input_image", "input_audio")
_SPEAKERS: Final[dict[str, Speaker | None]] = {  # Who speaks in a message, by its role, or its type where it has that.
    # Instructions are no part of a run.
    **dict.fromkeys(("system", "developer"), None),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "ai", "model", "tool-call"), "agent"),
    **dict.fromkeys(("tool", "function", "tool-response", "functionexecutionresult"), "result"),
}
_CONTENTS: Final = ("parts", "content", "blocks", "text", "message")
_NAMES: Final = ("name", "toolName", "tool_name", "function_name")
_ARGUMENTS: Final = ("arguments", "args", "input", "server_tool_call")
_IDS: Final = ("call_id", "tool_use_id", "toolUseId", "toolCallId", "tool_call_id", "source_call_id", "id")
# Before it was called ``response`` in the GenAI conventions it was called ``result``.
_RETURNED: Final = ("output", "response", "result", "server_tool_call_response", "content")
_CALL_TYPES: Final = ("function_call", "mcp_call", "custom_tool_call", "tool_call", "server_tool_call")
"""Types of blocks that are a call with a name, as those are that end in ``tool_use``; other calls are built in."""
_ENDS_OF_RESULT_TYPES: Final = ("_call_output", "tool_call_response", "tool_result")
_CALL_KEYS: Final = ("functionCall", "function_call", "toolUse", "tool_call")
_RESULT_KEYS: Final = ("functionResponse", "function_response", "toolResult", "tool_call_result")
_THOUGHTS: Final = ("reasoning", "thinking")
_BESIDE_A_CALL: Final = frozenset({"id", "call_id", "type", "status", "caller", "namespace"})  # Fields that are no arguments.
_ALTERNATIVES: Final = ("choices", "candidates", "generations")  # Several answers to a request, of which clients use the first.
_HOLDERS: Final = {  # Keys of a request, or of an answer, that hold its messages or its text.
    "user": "messages contents new_message input prompt question query task message content kwargs".split(),  # noqa: SIM905
    "agent": (*_ALTERNATIVES, "messages", "output", "message", "content", "response", "answer", "result", "text"),
}
_OF_ANSWERS: Final = {"toolCalls", "tool_calls", "finishReason", "finish_reason", "usage"}
_OF_DEFINITIONS: Final = {"function", "input_schema", "inputSchema", "parameters"}  # Of tools that some record among messages.
_TRANSCRIPT: Final = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.MULTILINE | re.IGNORECASE)


class Piece(NamedTuple):
    """What happens in a run: the user asks, the agent says something or calls a tool, the tool returns something."""

    node: Node
    kind: Literal["user", "agent", "call", "result"]
    text: str = ""  # Of a call: the call as the agent wrote it, where it wrote one.
    name: str = ""  # Of the tool.
    arguments: Any = None  # As the format has them: JSON, or a text that mostly is.
    call_id: str = ""
    latency_ms: float | None = None
    is_error: bool = False  # Whether the format says that a result is an error.


class Transcript:
    """Reads lists of messages of which each may begin with the one before: what was read is not read again."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._pieces: list[Piece] = []

    def pieces(
        self, messages: Node, speaker: Speaker = "agent", is_readable: Callable[[object], bool] = lambda _: True
    ) -> list[Piece] | None:
        """The pieces in a list of messages, or None if one of them is not readable."""
        count = len(self._messages)
        start = count if isinstance(messages.value, list) and messages.value[:count] == self._messages else 0
        items = [item._replace(value=_item_in(item.value)) for item in messages.items(start)]
        if not all(is_readable(item.value) for item in items):
            return None
        new = list(pieces_of(items, speaker))
        pieces = self._pieces + new if start else new
        if pieces:
            self._messages, self._pieces = messages.value, pieces
        return pieces


def pieces_in(content: Node, speaker: Speaker, transcript: Transcript, *, is_model: bool) -> list[Piece] | None:
    """The pieces in what a model or an agent got or put out: messages, what holds them, or a text; None if it is neither.

    Of a model, a message is what has a role; what others got or put out may be anything. An answer may lack its role.
    """
    try:
        return _pieces_in(content, speaker, transcript, is_model=is_model)
    except NotConverted:
        if is_model:
            raise
        return None


def _pieces_in(content: Node, speaker: Speaker, transcript: Transcript, *, is_model: bool) -> list[Piece] | None:
    value = content.value
    if isinstance(value, str):
        begins = _TRANSCRIPT.match(value) if is_model else None
        if begins and (speaker == "user" or begins[1].lower() in ("assistant", "ai")):
            return list(_pieces_of_transcript(content))
        return None if value.lstrip().startswith(("{", "[")) else utterance(content, speaker, value)
    if isinstance(value, list) and value:
        # LangChain's models get lists of conversations; events have an answer each.
        if len(value) == 1 and isinstance(value[0], list | dict) and not _is_item(_item_in(value[0])):
            return _pieces_in(content.items()[0], speaker, transcript, is_model=is_model)
        if not is_model and not any(_is_item_for_sure(_item_in(item)) for item in value):
            return None
        # Among messages a block of a type that is not known says nothing.
        is_chat = any(is_message(_item_in(item)) for item in value)
        return transcript.pieces(content, speaker, lambda item: _is_item(item) or (is_chat and _type(item) != ""))
    if not isinstance(value, dict):
        return None
    # Beside a text there may be more that a model put out, unless the object is that of an answer.
    more = {key for key in value if value[key] and key != "text"}
    is_answer = speaker == "agent" and not _is_item(value) and ("text" not in value or not more or bool(more & _OF_ANSWERS))
    message = {"role": "assistant"} | value if is_answer else value
    if _is_item_for_sure(message) or (is_model and _is_item(value)):
        return list(pieces_of([content._replace(value=message)], speaker))
    return _pieces_held(content, speaker, transcript, is_model=is_model)


def _pieces_held(content: Node, speaker: Speaker, transcript: Transcript, *, is_model: bool) -> list[Piece] | None:
    """The pieces in what an object without a role holds under a key of requests or answers."""
    fields = content.object()
    if "role" in fields:
        return None
    if fields == {"content": "role"}:
        # An exporter took a message for a list, and so recorded the first of its keys.
        return []
    for key in _HOLDERS["agent" if speaker == "agent" else "user"]:
        inner = content.at(key).parsed()
        while key in _ALTERNATIVES and isinstance(inner.value, list) and inner.value:
            inner = inner.items()[0]
        # A text beside other fields may be a part of what a model put out.
        is_part = is_model and speaker == "agent" and isinstance(inner.value, str) and len(fields) > 1
        pieces = None if is_part or inner.value is None else _pieces_in(inner, speaker, transcript, is_model=is_model)
        if pieces is not None:
            return pieces
    return None


def _pieces_of_transcript(content: Node) -> Iterator[Piece]:
    _, *parts = _TRANSCRIPT.split(content.text())
    for role, text in zip(parts[::2], parts[1::2], strict=True):
        if (speaker := _SPEAKERS[role.lower()]) and text.strip() != "None":
            yield from utterance(content, speaker, text.strip())


def pieces_of(items: Iterable[Node], speaker: Speaker = "agent") -> Iterator[Piece]:
    """The pieces in messages and in items that stand beside messages, and are blocks of one each."""
    for item in items:
        if is_message(item.value):
            yield from pieces_of_message(item)
        elif text := _text_of_block(item.value):
            yield from utterance(item, speaker, text)
        else:
            yield from _pieces_of_block(item)


def pieces_of_message(message: Node) -> Iterator[Piece]:
    """The pieces in a message, which must have a role. Instructions, of the system or the developer, are no part of a run."""
    message = message._replace(value=_with_role(message.object()))
    role = message.at("role")
    if (name := _role(role.required_text())) not in _SPEAKERS:
        raise role.refusal("expected system, developer, user, assistant, tool or function")
    speaker, content = _SPEAKERS[name], _blocks_in(message.first(*_CONTENTS))
    if speaker == "agent":
        yield from _pieces_of_answer(message, content)
    elif speaker == "user":
        yield from _pieces_of_content(message, "user", content)
    elif speaker and isinstance(content.value, list) and any(_sort_of(block) in ("call", "result") for block in content.value):
        yield from _pieces_of_content(message, "result", content)
    elif speaker == "result":
        is_definition = isinstance(content.value, dict) and bool(_OF_DEFINITIONS & set(content.value))
        if message.at("tool_call_id").value or not is_definition:
            yield _result(message, content)


def _pieces_of_answer(message: Node, content: Node) -> Iterator[Piece]:
    yield from utterance(message, "agent", text_in(message.at("reasoning_content").value))
    if content.value in (None, "", []):
        content = message.at("refusal")
    own_pieces = list(_pieces_of_content(message, "agent", content))
    yield from own_pieces
    ids = {piece.call_id for piece in own_pieces if piece.kind == "call"}
    calls = message.first("tool_calls", "toolCalls").parsed().items()
    for call in calls or message.at("additional_kwargs", "tool_calls").items():
        # LangChain has the calls that are blocks here as well.
        if (piece := _call(call)).call_id not in ids or not ids:
            yield piece
    # The form before a message could have several calls.
    legacy = message.at("function_call"), message.at("additional_kwargs", "function_call")
    yield from map(_call, [each for each in legacy if each.value is not None][:1])


def utterance(node: Node, kind: Speaker, text: str) -> list[Piece]:
    """A text of the user or the agent, unless it is blank."""
    return [Piece(node, kind, text)] if text.strip() else []


def _pieces_of_content(message: Node, kind: Speaker, content: Node) -> Iterator[Piece]:
    """The pieces in a text, or in a list of blocks, where texts are one with nothing but images between them."""
    if isinstance(content.value, dict) and "parts" in content.value:
        content = content.at("parts")
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
    kind, sort = _type(block.object()), _sort_of(block.value)
    if sort in ("call", "result"):
        keys = _CALL_KEYS if sort == "call" else _RESULT_KEYS
        inner = next((block.at(key) for key in keys if isinstance(block.value.get(key), dict)), block)
        yield _call(inner) if sort == "call" else _result(inner, inner.first(*_RETURNED))
    elif sort == "thought":
        thoughts = (text_in(block.at(key).value) for key in ("summary", "content", "text", "thinking") if block.at(key).value)
        yield from utterance(block, "agent", "\n".join(thoughts))
    elif block.at("type").required_text() and sort == "built-in call":
        arguments, call_id = _own_fields(block, kind), block.first("call_id", "id").text()
        yield Piece(block, "call", name=kind.removesuffix("_call"), arguments=arguments, call_id=call_id)
    if kind == "mcp_call" and (returned := block.first("error", "output")).value is not None:
        yield _result(block, returned)._replace(is_error=block.at("error").value is not None)


def _blocks_in(content: Node) -> Node:
    """A content; as a list of blocks, if it is a text that is the JSON of one, as some record them."""
    blocks = content.parsed() if isinstance(content.value, str) else content
    are_blocks = isinstance(blocks.value, list) and bool(blocks.value) and all(map(_sort_of, blocks.value))
    return blocks if are_blocks else content


def _call(call: Node) -> Piece:
    function = call if any(key in call.object() for key in _NAMES) else call.first("function", "custom")
    name, arguments = function.first(*_NAMES).required_text(), function.first(*_ARGUMENTS).value
    return Piece(call, "call", name=name, arguments=arguments, call_id=call.first(*_IDS).text())


def _result(holder: Node, content: Node) -> Piece:
    text, is_error = returned_in(content.value)
    is_error = is_error or any(holder.at(key).value is True for key in _ERROR_KEYS) or holder.at("status").value == "error"
    call_id, name = holder.first(*_IDS).text(), holder.first(*_NAMES).text()
    return Piece(holder, "result", text, name, call_id=call_id, is_error=is_error)


def returned_in(value: object) -> tuple[str, bool]:
    """The text of what a tool returned, out of the envelopes that protocols put it in, and whether they say that it failed."""
    if isinstance(value, dict):
        fields, is_error = set(value), any(value.get(key) is True for key in _ERROR_KEYS) or value.get("status") == "error"
        message = _with_role(value)
        is_message_of_tool = _SPEAKERS.get(_role(message.get("role"))) == "result" or "tool_call_id" in fields
        if is_message_of_tool and "content" in message:
            return text_in(message["content"]), is_error
        if isinstance(value.get("content"), list) and fields <= {"content", "structuredContent", "_meta", *_ERROR_KEYS}:
            return text_in(value["content"]), is_error
        if fields == {"type", "value"} and isinstance(value["type"], str):
            return text_in(value["value"]), value["type"].startswith("error")
        for key in ("response", "message"):
            if key in fields and fields <= {"id", "name", key}:
                return text_in(parsed(value[key])), False
    return text_in(value), False


def _sort_of(block: object) -> str:
    """What a part of a message is: a call, a built-in call, a result, a thought, a text, or left out; empty if none of them."""
    if not isinstance(block, dict):
        return ""
    kind, function = _type(block), block.get("function")
    # As Chat Completions has a call; without arguments it is a tool's definition.
    is_of_function = isinstance(function, dict) and {"name", "arguments"} <= set(function)
    has_all = not kind and all(any(key in block for key in keys) for keys in (_NAMES, _ARGUMENTS, _IDS))
    if any(isinstance(block.get(key), dict) for key in _CALL_KEYS):
        return "call"
    if any(isinstance(block.get(key), dict) for key in _RESULT_KEYS):
        return "result"
    if kind in _THOUGHTS or block.get("thought") is True:
        return "thought"
    if kind.endswith(_ENDS_OF_RESULT_TYPES) or (not kind and "call_id" in block and "content" in block):
        return "result"
    if is_of_function or has_all or kind in _CALL_TYPES or kind.endswith("tool_use"):
        return "call"
    if kind.endswith("_call"):
        return "built-in call"
    if (kind or set(block) == {"text"}) and _text_of_block(block) is not None:
        return "text"
    return "left out" if kind in (*_MEDIA_TYPES, "item_reference", "redacted_thinking") else ""


def _is_item(value: object) -> bool:
    return is_message(value) or bool(_sort_of(value))


def _is_item_for_sure(value: object) -> bool:
    """Whether a value that may be anything is a message: it has one of the roles, and a message's content, or calls."""
    if not isinstance(value, dict):
        return False
    message = _with_role(value)
    if _role(message.get("role")) not in _SPEAKERS:
        return ("toolCallId" in value and _sort_of(value) == "call") or set(value) == {"text"}
    contents = [message.get(key) for key in _CONTENTS]
    is_empty = "content" in message and message["content"] is None
    return is_empty or any(isinstance(content, str | list) for content in (*contents, message.get("tool_calls")))


def _item_in(item: object) -> object:
    """An item of a list of messages, which may be a text that shows it, or a pair of its role and its text."""
    item = parsed(item)
    if isinstance(item, list) and len(item) == 2 and _role(item[0]) in _SPEAKERS and isinstance(item[1], str):
        return {"role": item[0], "content": item[1]}
    return item


def is_message(value: object) -> bool:
    """Whether a value is a chat message, as far as one can tell."""
    return isinstance(value, dict) and isinstance(_with_role(value).get("role"), str)


def _with_role(value: dict[str, Any]) -> dict[str, Any]:
    """A message with its role; those of LangChain and AutoGen have a type instead, and may be recorded as a constructor."""
    kind: object = value.get("type")
    fields: object = value
    if isinstance(value.get("role"), str):
        return value
    if kind == "constructor" and isinstance(value.get("id"), list) and value["id"]:
        kind, fields = value["id"][-1], value.get("kwargs")
    elif isinstance(value.get("data"), dict):
        fields = value["data"]
    elif isinstance(value.get("message"), dict) and "role" in value["message"]:
        # Of a choice, or of an event that is one.
        return dict(value["message"])
    if isinstance(fields, dict) and "content" in fields and _role(kind) in _SPEAKERS:
        return fields | {"role": _role(kind)}
    return value


def _role(name: object) -> str:
    own = name.lower().rpartition(".")[2] if isinstance(name, str) else ""
    return own.removesuffix("chunk").removesuffix("message")


def _type(block: object) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind.replace("-", "_") if isinstance(kind, str) else ""


def _own_fields(item: Node, kind: str) -> dict[str, Any]:
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
    if not isinstance(block, dict) or _type(block) in _THOUGHTS or block.get("thought") is True:
        return None
    keys = ("text", "refusal", "content") if block.get("type") == "text" else ("text", "refusal")
    return next((text for key in keys if isinstance(text := block.get(key), str)), None)


def text_in(value: object) -> str:
    """A result as a text: the texts of a list of blocks one a line, nothing of an image or a sound, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(block, dict) for block in value):
        texts = [_text_of_block(block) for block in value if {"type", "block_type"} & set(block) or set(block) == {"text"}]
        if len(texts) == len(value) and (any(texts) or all(block.get("type") in _MEDIA_TYPES for block in value)):
            return "\n".join(filter(None, texts))
    is_without_text = value is None or (isinstance(value, dict) and value.get("type") in _MEDIA_TYPES)
    return "" if is_without_text else as_json(value)


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
