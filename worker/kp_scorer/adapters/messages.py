"""Reads the messages of a run in any format: roles, blocks of content, calls of tools and their results.

One reader serves all formats and goes by the shapes of messages: OpenAI's chats and items of the Responses API, Anthropic's
blocks, Gemini's contents, messages of LangChain and AutoGen, parts of the AI SDK, of Bedrock and of the GenAI conventions.
A format only leads to the inputs and outputs of models and agents.
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
_SPEAKERS: Final[dict[str, Speaker | None]] = {  # The speaker of a message by its role, or by its type.
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
# ``response`` was ``result`` in earlier GenAI conventions.
_RETURNED: Final = ("output", "response", "result", "server_tool_call_response", "content")
_CALL_TYPES: Final = ("function_call", "mcp_call", "custom_tool_call", "tool_call", "server_tool_call")
"""Types of blocks that are a call with a name, beside those that end in ``tool_use``. Other calls are built in."""
_ENDS_OF_RESULT_TYPES: Final = ("_call_output", "tool_call_response", "tool_result")
_CALL_KEYS: Final = ("functionCall", "function_call", "toolUse", "tool_call")
_RESULT_KEYS: Final = ("functionResponse", "function_response", "toolResult", "tool_call_result")
_THOUGHTS: Final = ("reasoning", "thinking")
_BESIDE_A_CALL: Final = frozenset({"id", "call_id", "type", "status", "caller", "namespace"})  # These fields are no arguments.
_ALTERNATIVES: Final = ("choices", "candidates", "generations")  # A request may have several answers. Clients use the first.
_HOLDERS: Final = {  # The keys of a request, and of an answer, that hold its messages or its text.
    "user": "messages contents new_message input prompt question query task message content kwargs".split(),  # noqa: SIM905
    "agent": (*_ALTERNATIVES, "messages", "output", "message", "content", "response", "answer", "result", "text"),
}
_ANSWER_FIELDS: Final = {"toolCalls", "tool_calls", "finishReason", "finish_reason", "usage"}
_DEFINITION_FIELDS: Final = {"function", "input_schema", "inputSchema", "parameters"}
"""Some exporters record the definitions of tools among the messages."""
_TRANSCRIPT: Final = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.MULTILINE | re.IGNORECASE)


class Piece(NamedTuple):
    """A piece of a run: the user asks, the agent says something or calls a tool, or the tool returns something."""

    node: Node
    kind: Literal["user", "agent", "call", "result"]
    text: str = ""  # For a call, the words in which the agent wrote it, if it did.
    name: str = ""  # The tool's.
    arguments: Any = None  # As the source holds them: JSON, or a text that mostly is JSON.
    call_id: str = ""
    latency_ms: float | None = None
    is_error: bool = False  # Whether the source marks a result as an error.


class Transcript:
    """Reads lists of messages, each of which may begin with the list before it, and reads no message twice."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._pieces: list[Piece] = []

    def pieces(
        self, messages: Node, speaker: Speaker = "agent", is_readable: Callable[[object], bool] = lambda _: True
    ) -> list[Piece] | None:
        """Return the pieces in a list of messages; None if one of them is not readable."""
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
    """Return the pieces in an input or output: messages, an object that holds them, or a text; None if it is none of these.

    With ``is_model``, every object with a role is a message. Inputs and outputs of other spans may be anything. An answer may
    lack its role.
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
        # LangChain's models get a list of conversations, and each event has a list of one answer.
        if len(value) == 1 and isinstance(value[0], list | dict) and not _is_item(_item_in(value[0])):
            return _pieces_in(content.items()[0], speaker, transcript, is_model=is_model)
        if not is_model and not any(_is_item_for_sure(_item_in(item)) for item in value):
            return None
        # Among messages, a block of an unknown type holds nothing.
        is_chat = any(is_message(_item_in(item)) for item in value)
        return transcript.pieces(content, speaker, lambda item: _is_item(item) or (is_chat and _type(item) != ""))
    if not isinstance(value, dict):
        return None
    # An object with a text and other fields is an answer only if it has fields of answers.
    more = {key for key in value if value[key] and key != "text"}
    is_answer = speaker == "agent" and not _is_item(value) and ("text" not in value or not more or bool(more & _ANSWER_FIELDS))
    message = {"role": "assistant"} | value if is_answer else value
    if _is_item_for_sure(message) or (is_model and _is_item(value)):
        return list(pieces_of([content._replace(value=message)], speaker))
    return _pieces_held(content, speaker, transcript, is_model=is_model)


def _pieces_held(content: Node, speaker: Speaker, transcript: Transcript, *, is_model: bool) -> list[Piece] | None:
    """Return the pieces that an object without a role holds under a key of requests or answers."""
    fields = content.object()
    if "role" in fields:
        return None
    if fields == {"content": "role"}:
        # An exporter took a message for a list, and recorded the first of its keys.
        return []
    for key in _HOLDERS["agent" if speaker == "agent" else "user"]:
        inner = content.at(key).parsed()
        while key in _ALTERNATIVES and isinstance(inner.value, list) and inner.value:
            inner = inner.items()[0]
        # A text beside other fields may be only a part of the output of a model.
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
    """Yield the pieces in messages, and in the items that stand beside messages in place of a block."""
    for item in items:
        if is_message(item.value):
            yield from pieces_of_message(item)
        elif text := _text_of_block(item.value):
            yield from utterance(item, speaker, text)
        else:
            yield from _pieces_of_block(item)


def pieces_of_message(message: Node) -> Iterator[Piece]:
    """Yield the pieces in a message, which must have a role. A message of the system or the developer has none."""
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
        is_definition = isinstance(content.value, dict) and bool(_DEFINITION_FIELDS & set(content.value))
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
        # LangChain repeats here the calls that are blocks.
        if (piece := _call(call)).call_id not in ids or not ids:
            yield piece
    # The earlier form, in which a message has one call.
    legacy = message.at("function_call"), message.at("additional_kwargs", "function_call")
    yield from map(_call, [each for each in legacy if each.value is not None][:1])


def utterance(node: Node, kind: Speaker, text: str) -> list[Piece]:
    """Return a text as a list of one piece; an empty list if it is blank."""
    return [Piece(node, kind, text)] if text.strip() else []


def _pieces_of_content(message: Node, kind: Speaker, content: Node) -> Iterator[Piece]:
    """Yield the pieces in a text or in a list of blocks, in which texts are one piece if only images are between them."""
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
    """Yield the pieces in a block that is no text: in a thought, a call or a result. Other blocks have none."""
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
    """Return a content as a list of blocks if it is the JSON of one, as some exporters record it; else as it is."""
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
    """Return the text of a result without the envelopes of protocols, and whether an envelope marks it as an error."""
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
    """Return the sort of a block: call, built-in call, result, thought, text or left out; empty if it is none of them."""
    if not isinstance(block, dict):
        return ""
    kind, function = _type(block), block.get("function")
    # In Chat Completions a call has arguments, and the definition of a tool has none.
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
    """Return whether a value that may be anything is a message: it has a known role, and content or calls."""
    if not isinstance(value, dict):
        return False
    message = _with_role(value)
    if _role(message.get("role")) not in _SPEAKERS:
        return ("toolCallId" in value and _sort_of(value) == "call") or set(value) == {"text"}
    contents = [message.get(key) for key in _CONTENTS]
    is_empty = "content" in message and message["content"] is None
    return is_empty or any(isinstance(content, str | list) for content in (*contents, message.get("tool_calls")))


def _item_in(item: object) -> object:
    """Return an item of a list of messages. It may be recorded as a text, or as a pair of its role and its text."""
    item = parsed(item)
    if isinstance(item, list) and len(item) == 2 and _role(item[0]) in _SPEAKERS and isinstance(item[1], str):
        return {"role": item[0], "content": item[1]}
    return item


def is_message(value: object) -> bool:
    """Return whether a value looks like a chat message."""
    return isinstance(value, dict) and isinstance(_with_role(value).get("role"), str)


def _with_role(value: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its role. Messages of LangChain and AutoGen have a type instead, or are a constructor call."""
    kind: object = value.get("type")
    fields: object = value
    if isinstance(value.get("role"), str):
        return value
    if kind == "constructor" and isinstance(value.get("id"), list) and value["id"]:
        kind, fields = value["id"][-1], value.get("kwargs")
    elif isinstance(value.get("data"), dict):
        fields = value["data"]
    elif isinstance(value.get("message"), dict) and "role" in value["message"]:
        # A choice holds its message, as an event of one does.
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
    """Return the text of a block; None if the block is no text, or a thought."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or _type(block) in _THOUGHTS or block.get("thought") is True:
        return None
    keys = ("text", "refusal", "content") if block.get("type") == "text" else ("text", "refusal")
    return next((text for key in keys if isinstance(text := block.get(key), str)), None)


def text_in(value: object) -> str:
    """Return a result as a text: blocks of text one a line, images and sounds as nothing, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(block, dict) for block in value):
        texts = [_text_of_block(block) for block in value if {"type", "block_type"} & set(block) or set(block) == {"text"}]
        if len(texts) == len(value) and (any(texts) or all(block.get("type") in _MEDIA_TYPES for block in value)):
            return "\n".join(filter(None, texts))
    is_without_text = value is None or (isinstance(value, dict) and value.get("type") in _MEDIA_TYPES)
    return "" if is_without_text else as_json(value)


def is_error(result: Piece) -> bool:
    """Return whether a result is an error, as ``worker/CONVERT.md`` defines it."""
    if result.is_error or _ERROR.match(result.text):
        return True
    content = parsed(result.text)
    return isinstance(content, dict) and any(content.get(key) for key in _ERROR_KEYS)


def call_input(call: Piece) -> dict[str, Any] | None:
    """Return the arguments of a call as an object; anything else becomes the ``arguments`` of one."""
    content = parsed(call.arguments)
    if content is None or isinstance(content, dict):
        return content
    return {"arguments": content} if content != "" else {}


def call_text(call: Piece) -> str:
    """Return a call as a text: as the agent wrote it, or the name of the tool with its arguments in brackets."""
    if call.text:
        return call.text
    arguments = parsed(call.arguments)
    arguments_text = arguments if isinstance(arguments, str) else "" if arguments is None else as_json(arguments)
    return f"{call.name}({arguments_text})"
