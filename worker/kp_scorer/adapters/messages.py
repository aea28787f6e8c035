"""Reads the messages of a run in any format: roles, blocks of content, calls of tools and their results.

One reader serves all formats and goes by the shapes of messages: OpenAI's chats and items of the Responses API, Anthropic's
blocks, Gemini's contents, messages of LangChain and AutoGen, parts of the AI SDK, of Bedrock and of the GenAI conventions. What
has a name and arguments is a call, and what answers the id of one is its result, whatever their types are called. A format only
leads to the inputs and outputs of models and agents.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

from kp_scorer.adapters.node import Node, as_json, parsed, spelt
from kp_scorer.errors import NotConverted

Speaker = Literal["user", "agent", "result"]

_ERROR: Final = re.compile(
    r"\s*(?:Traceback \(most recent call last\)|(?:[\w.]*(?:Error|Exception)|(?i:error|exception))\b[^\n:]{0,60}:)"
)
_EXIT: Final = re.compile(
    r"^[\[(<]?[\w' ]{0,40}\b(?:exit(?:ed)?(?: with)?(?: code| status)|returncode|return code|exit_code)\W{1,3}[1-9]",
    re.MULTILINE | re.I,
)
"""A line of a result that says with which code a command ended, if it is not 0."""
_EXIT_CODES: Final = ("exitcode", "returncode", "exitstatus")
_EXIT_CHARS: Final = (
    300  # Programs say so in the first or in the last lines of a result. Between them are those of the command.
)
_ERROR_KEYS: Final = ("error", "isError", "is_error")
_BESIDE_RESULTS: Final = ("structuredContent", "_meta", "tool_name", "raw_input", "raw_output", *_ERROR_KEYS)
_FAILURES: Final = ("error", "failed", "failure", "output-error")
_MEDIA_TYPES: Final = ("computer_screenshot", "image", "image_url", "input_image", "input_audio")
SPEAKERS: Final[dict[str, Speaker | None]] = {  # The speaker of a message by its role, or by its type, without signs.
    # Instructions are no part of a run.
    **dict.fromkeys(("system", "developer", "systemprompt"), None),
    **dict.fromkeys(("user", "human", "userprompt"), "user"),
    **dict.fromkeys("assistant ai model agent bot chatbot gpt gemini llm toolcall functioncall".split(), "agent"),  # noqa: SIM905
    **dict.fromkeys(
        "tool function toolresponse toolresult toolreturn functionexecutionresult functionresponse functionresult ipython "  # noqa: SIM905
        "environment observation".split(),
        "result",
    ),
}
_ONLY_ROLES: Final = (
    "toolcall",
    "functioncall",
    "toolresponse",
    "toolresult",
    "toolreturn",
    "functionresponse",
    "functionresult",
)
"""Roles that are types of blocks elsewhere."""
_ROLE_KEYS: Final = ("role", "author", "from", "sender", "info")  # Each may hold the name of a role, or an object that has it.
_CONTENTS: Final = ("parts", "content", "blocks", "items", "text", "message", "value", "data")
# All of these are names of fields without signs and in lower case: ``toolcallid`` is ``toolCallId`` and ``tool_call_id``.
_NAMES: Final = ("name", "toolname", "functionname", "apiname", "tool", "function", "toolid")
_TOOL_NAMES: Final = {"toolname", "functionname", "apiname"}
_ARGUMENTS: Final = ("arguments", "args", "input", "toolinput", "toolargs", "toolkwargs", "paramdict", "servertoolcall")
_CALL_IDS: Final = ("callid", "tooluseid", "toolcallid", "sourcecallid")
_IDS: Final = (*_CALL_IDS, "id")
# ``response`` was ``result`` in earlier GenAI conventions.
_RETURNED: Final = (
    "output",
    "response",
    "result",
    "servertoolcallresponse",
    "content",
    "observation",
    "returnvalue",
    "errortext",
    "value",
)
_RETURNED_BY_CALLS: Final = ("output", "result", "observation", "aggregatedoutput", "errortext")
_UNFINISHED: Final = ("in_progress", "running", "pending")
_BESIDE_A_RESULT: Final = frozenset("success status is_error isError exit_code exitCode kind type".split())  # noqa: SIM905
_CALL_TYPES: Final = ("function_call", "mcp_call", "custom_tool_call", "tool_call", "server_tool_call")
"""Types of blocks that are a call with a name, beside those that end in ``tool_use``. Other calls are built in."""
_ENDS_OF_RESULT_TYPES: Final = (
    *("_call_output", "tool_call_response", "tool_result", "tool_return", "tool_response", "function_result"),
    "function_response",
)
_LISTS_OF_CALLS: Final = ("toolcalls", "toolrequests", "toolinvocations")
_CALL_KEYS: Final = ("functioncall", "tooluse", "toolcall", "toolinvocation")
_RESULT_KEYS: Final = ("functionresponse", "toolresult", "toolcallresult", "tooloutput")
_TEXTS: Final = ("text", "refusal", "value", "Text")
_THOUGHTS: Final = ("reasoning", "thinking", "think")
_BESIDE_A_CALL: Final = frozenset({"id", "call_id", "type", "status", "caller", "namespace"})  # These fields are no arguments.
_ALTERNATIVES: Final = ("choices", "candidates", "generations")  # A request may have several answers. Clients use the first.
_HOLDERS: Final = {  # The keys of a request, and of an answer, that hold its messages or its text.
    "user": (
        *("messages", "contents", "new_message", "input", "prompt", "question", "query", "instruction", "task", "description"),
        *("message", "content", "kwargs"),
    ),
    "agent": (
        *_ALTERNATIVES,
        "messages",
        "output",
        "message",
        "content",
        "response",
        "answer",
        "result",
        "raw",
        "text",
        "input",
    ),
}
_ANSWER_FIELDS: Final = {"toolCalls", "tool_calls", "finishReason", "finish_reason", "usage"}
_DEFINITION_FIELDS: Final = {"function", "input_schema", "inputSchema", "parameters"}
"""Some exporters record the definitions of tools among the messages."""
_TRANSCRIPT: Final = re.compile(r"^(system|developer|user|human|assistant|ai|tool): ", re.MULTILINE | re.IGNORECASE)


class Piece(NamedTuple):
    """A piece of a run: the user asks, the agent says something or calls a tool, or the tool returns something."""

    node: Node
    kind: Literal["user", "agent", "call", "result"]
    text: str = ""  # The words in which the agent wrote a call, if it wrote it itself.
    name: str = ""  # The name of the tool.
    arguments: Any = None  # In the form of the source: JSON, or a text that mostly is JSON.
    call_id: str = ""
    latency_ms: float | None = None
    is_error: bool = False  # True if the source marks a result as an error.


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
    is_bare = not _is_item(value) and "response" not in value
    is_answer = speaker == "agent" and is_bare and ("text" not in value or not more or bool(more & _ANSWER_FIELDS))
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
        if (speaker := SPEAKERS[role.lower()]) and text.strip() != "None":
            yield from utterance(content, speaker, text.strip())


def pieces_of(items: Iterable[Node], speaker: Speaker = "agent") -> Iterator[Piece]:
    """Yield the pieces in messages, and in the items that stand beside messages in place of a block.

    A message whose role is unknown, such as the name of a tool, is a result if it follows a call.
    """
    has_called = False
    for item in items:
        if is_message(item.value) and (role_of(with_role(item.value)["role"]) in SPEAKERS or sort_of(item.value) != "call"):
            pieces = list(pieces_of_message(item, "tool" if has_called else ""))
        elif text := text_of_block(item.value):
            pieces = utterance(item, speaker, text)
        elif isinstance(item.value, dict) and isinstance(item.value.get("parts"), list):
            pieces = list(pieces_of(item.at("parts").items(), speaker))
        else:
            pieces = list(_pieces_of_block(item))
        yield from pieces
        has_called = pieces[-1].kind in ("call", "result") if pieces else has_called


def pieces_of_message(message: Node, unknown_role: str = "") -> Iterator[Piece]:
    """Yield the pieces in a message, which must have a role. A message of the system or the developer has none.

    An unknown role is read as ``unknown_role``; without one, the message is skipped.
    """
    message = message._replace(value=with_role(message.object()))
    role = role_of(message.at("role").required_text())
    if (name := role if role in SPEAKERS else unknown_role) not in SPEAKERS:
        message.skip()
        return
    speaker, content = SPEAKERS[name], _blocks_in(_content_of(message))
    sorts = {sort_of(block) for block in content.value} if isinstance(content.value, list) else set()
    if role in _ONLY_ROLES and speaker == "agent" and all(_is_called(each.value) for each in content.parsed().each()):
        yield from map(_call, content.parsed().each())
    elif speaker == "agent":
        yield from _pieces_of_answer(message, content)
    elif speaker == "user":
        yield from _pieces_of_content(message, "user", content)
    elif speaker and sorts & {"call", "result"}:
        yield from _pieces_of_content(message, "result", content)
    elif speaker == "result":
        is_definition = isinstance(content.value, dict) and bool(_DEFINITION_FIELDS & set(content.value))
        if message.at("tool_call_id").value or not is_definition:
            yield _result(message, content)


def _is_called(value: object) -> bool:
    """Return whether a value, which says that it is a call, has what a call needs."""
    return isinstance(value, dict) and bool(_name_of(value)) and any(key in _ARGUMENTS for key in spelt(value))


def _content_of(message: Node) -> Node:
    """Return the content of a message, which may be in an envelope of its own."""
    content = _first_content(message)
    while isinstance(content.value, dict) and not sort_of(content.value) and any(key in content.value for key in _CONTENTS):
        content = _first_content(content)
    return content


def _first_content(message: Node) -> Node:
    contents = (message.at(key) for key in _CONTENTS if message.value.get(key) not in (None, "", []))
    return next(contents, message.first(*_CONTENTS))


def _pieces_of_answer(message: Node, content: Node) -> Iterator[Piece]:
    yield from utterance(message, "agent", text_in(message.at("reasoning_content").value))
    if content.value in (None, "", []):
        content = message.at("refusal")
    own_pieces = list(_pieces_of_content(message, "agent", content))
    yield from own_pieces
    ids = {piece.call_id for piece in own_pieces if piece.kind == "call"}
    # LangChain repeats the calls that are blocks. The earlier form of OpenAI's messages has one call.
    wrapped = message.at("additional_kwargs") if isinstance(message.value.get("additional_kwargs"), dict) else message
    calls = message.like(*_LISTS_OF_CALLS).parsed().items() or wrapped.at("tool_calls").items()
    calls = calls or [each for each in (message.at("function_call"), wrapped.at("function_call")) if each.value is not None][:1]
    for call in calls:
        pieces = list(_call_and_result(call))
        if pieces[0].call_id not in ids or not ids:
            yield from pieces


def utterance(node: Node, kind: Speaker, text: str) -> list[Piece]:
    """Return a text as a list of one piece; an empty list if it is blank."""
    return [Piece(node, kind, text)] if text.strip() else []


def _pieces_of_content(message: Node, kind: Speaker, content: Node) -> Iterator[Piece]:
    """Yield the pieces in a text or in a list of blocks, in which texts are one piece if only images are between them."""
    if sort_of(content.value):
        yield from _pieces_of_block(content)
        return
    if not isinstance(content.value, list):
        if content.value is not None and not isinstance(content.value, str):
            raise content.refusal("expected a text or a list of parts")
        yield from utterance(message, kind, content.text())
        return
    texts: list[str] = []
    for block in content.items():
        if (text := text_of_block(block.value)) is not None:
            texts.append(text)
        elif pieces := list(_pieces_of_block(block)):
            yield from utterance(message, kind, "\n".join(filter(None, texts)))
            yield from pieces
            texts.clear()
    yield from utterance(message, kind, "\n".join(filter(None, texts)))


def _pieces_of_block(block: Node) -> Iterator[Piece]:
    """Yield the pieces in a block that is no text: in a thought, a call or a result. Other blocks have none."""
    kind, sort = _type(block.object()), sort_of(block.value)
    if sort == "call":
        thought = block.value.get("thought")
        yield from utterance(block, "agent", text_in(thought) if thought and thought is not True else "")
        yield from _call_and_result(block)
    elif sort == "result":
        inner = _inner(block, _RESULT_KEYS)
        yield _result(inner, inner.like(*_RETURNED))._replace(call_id=_id_of(inner) or _id_of(block))
    elif sort == "thought":
        thoughts = (text_in(block.at(key).value) for key in ("summary", "content", "text", *_THOUGHTS) if block.at(key).value)
        yield from utterance(block, "agent", "\n".join(thoughts))
    elif sort == "built-in call":
        yield Piece(block, "call", name=kind.removesuffix("_call"), arguments=_own_fields(block, kind), call_id=_id_of(block))
    elif not sort:
        block.skip()


def _blocks_in(content: Node) -> Node:
    """Return a content as a list of blocks if it is the JSON of one, as some exporters record it; else as it is."""
    blocks = content.parsed() if isinstance(content.value, str) else content
    are_blocks = isinstance(blocks.value, list) and bool(blocks.value) and all(map(sort_of, blocks.value))
    return blocks if are_blocks else content


def _call(call: Node) -> Piece:
    inner = _inner(call, _CALL_KEYS)
    kind = str(inner.value.get("type")) if isinstance(inner.value, dict) else ""
    if not _name_of(inner.object()) and kind.startswith("tool-"):
        # The AI SDK names the type of a part by its tool.
        return Piece(
            call, "call", name=kind.removeprefix("tool-"), arguments=inner.like(*_ARGUMENTS).value, call_id=_id_of(inner)
        )
    if "command" in inner.value and not _name_of(inner.value):
        return Piece(
            call, "call", name=_type(inner.value), arguments={"command": inner.value["command"]}, call_id=_id_of(inner)
        )
    function = inner if _name_of(inner.value) else inner.first("function", "custom")
    arguments = function.like(*_ARGUMENTS).value
    return Piece(call, "call", name=_name(function).required_text(), arguments=arguments, call_id=_id_of(inner) or _id_of(call))


def _call_and_result(call: Node) -> Iterator[Piece]:
    """Yield a call, and its result if it is recorded beside the arguments."""
    piece, inner = _call(call), _inner(call, _CALL_KEYS)
    yield piece
    error = inner.at("error")
    returned = error if error.value and error.value is not True else inner.like(*_RETURNED_BY_CALLS)
    if returned.value is not None and inner.at("status").value not in _UNFINISHED:
        yield _result(inner, returned)._replace(
            call_id=piece.call_id, is_error=_result(inner, returned).is_error or returned is error
        )


def _inner(block: Node, keys: Iterable[str]) -> Node:
    """Return the object within a block that has the fields of a call or of a result; the block itself if it has them."""
    names = spelt(block.object())
    inner = next((block.at(names[key]) for key in keys if key in names and isinstance(block.value[names[key]], dict)), block)
    for key in ("value", "state", "run"):
        if isinstance(own := inner.object().get(key), dict):
            inner = inner._replace(value=own | {name: value for name, value in inner.value.items() if name != key})
    if len(inner.value) == 1 and isinstance(own := next(iter(inner.value.values())), dict) and "args" in own:
        # The name of the tool is the key.
        inner = inner._replace(value={"name": next(iter(inner.value)), **own})
    return inner


def _name_of(fields: dict[str, Any]) -> str:
    """Return the name of the tool in a call or a result; empty if it has none."""
    names = spelt(fields)
    return next((name for key in _NAMES if key in names and isinstance(name := fields[names[key]], str) and name), "")


def _name(holder: Node) -> Node:
    """Return the field with the name of a tool, which is named in errors."""
    names = spelt(holder.object())
    texts = (holder.at(names[key]) for key in _NAMES if key in names and isinstance(holder.value[names[key]], str))
    return next(texts, holder.at(_NAMES[0]))


def _id_of(holder: Node) -> str:
    value = holder.like(*_IDS).value if isinstance(holder.value, dict) else None
    return value if isinstance(value, str) else ""


def _result(holder: Node, content: Node) -> Piece:
    text, is_error = returned_in(content.value)
    fields = holder.object()
    return Piece(holder, "result", text, _name_of(fields), call_id=_id_of(holder), is_error=is_error or _is_failure(fields))


def _is_failure(fields: dict[str, Any]) -> bool:
    """Return whether the fields of a result mark it as an error."""
    is_marked = any(fields.get(key) is True for key in _ERROR_KEYS) or fields.get("success") is False
    return is_marked or _has_exit_code(fields) or any(fields.get(key) in _FAILURES for key in ("status", "state"))


def _has_exit_code(fields: object) -> bool:
    """Return whether a field of an object is the code of a command that failed."""
    codes = [fields[key] for name, key in spelt(fields).items() if name in _EXIT_CODES] if isinstance(fields, dict) else []
    return any(isinstance(code, int) and code for code in codes)


def returned_in(value: object) -> tuple[str, bool]:
    """Return the text of a result without the envelopes of protocols, and whether an envelope marks it as an error."""
    if isinstance(value, list) and len(value) == 1 and sort_of(value[0]) == "result":
        value = value[0]
    if isinstance(value, dict):
        names = spelt(value)
        if key := next((names[each] for each in _RESULT_KEYS if each in names and isinstance(value[names[each]], dict)), ""):
            return returned_in(value[key])
        fields, is_error = set(value), _is_failure(value)
        message = with_role(value)
        is_message_of_tool = SPEAKERS.get(role_of(message.get("role"))) == "result" or "tool_call_id" in fields
        if is_message_of_tool and "content" in message:
            return text_in(message["content"]), is_error
        for key in ("content", "blocks"):
            if isinstance(value.get(key), list) and fields <= {key, *_BESIDE_RESULTS}:
                return text_in(value[key]), is_error
        if fields == {"type", "value"} and isinstance(value["type"], str):
            return text_in(value["value"]), value["type"].startswith("error")
        for key in ("response", "message", "result", "output"):
            if key in fields and fields <= {"id", "name", key}:
                return returned_in(parsed(value[key]))
        filled = {key for key, each in value.items() if each not in (None, "", [], {}) and key not in _BESIDE_A_RESULT}
        for key in ("output", "result", "content"):
            if filled == {key} and (isinstance(value[key], str) or _are_texts(value[key])):
                return text_in(value[key]), is_error
    return text_in(value), False


def _are_texts(blocks: object) -> bool:
    return isinstance(blocks, list) and all(sort_of(block) == "text" for block in blocks)


def sort_of(block: object) -> str:
    """Return the sort of a block: call, built-in call, result, thought, text or left out; empty if it is none of them."""
    if not isinstance(block, dict):
        return ""
    kind, names, function = _type(block), spelt(block), block.get("function")
    if isinstance(block.get("state"), dict):
        names = spelt(block["state"]) | names
    # In Chat Completions a call has arguments, and the definition of a tool has none.
    is_of_function = isinstance(function, dict) and {"name", "arguments"} <= set(function)
    has_call_id = any(key in names for key in _CALL_IDS)
    has_arguments = any(key in names for key in _ARGUMENTS)
    is_named = bool(_name_of(block)) or (has_call_id and kind.startswith("tool_"))
    # Other objects may have a name and an input too.
    is_of_tool = (
        has_call_id
        or bool(_TOOL_NAMES & set(names))
        or any(word in kind for word in ("tool", "call", "function"))
        or (not kind and "id" in names)
    )
    if any(isinstance(block.get(names.get(key, "")), dict) for key in _CALL_KEYS):
        return "call"
    if any(isinstance(block.get(names.get(key, "")), dict) for key in _RESULT_KEYS):
        return "result"
    if kind in _THOUGHTS or block.get("thought") is True:
        return "thought"
    if {"origin", "result"} <= set(block) or kind.endswith(_ENDS_OF_RESULT_TYPES):
        return "result"
    is_call = is_of_function or (is_named and has_arguments and is_of_tool) or (is_named and "tool_invocation" in kind)
    is_command = "command" in names and "exitcode" in names
    if is_call or is_command or kind in _CALL_TYPES or kind.endswith("tool_use"):
        return "call"
    if has_call_id and not has_arguments and any(key in names for key in _RETURNED):
        return "result"
    if kind.endswith("_call"):
        return "built-in call"
    if (kind or set(block) == {"text"}) and text_of_block(block) is not None:
        return "text"
    return "left out" if kind in (*_MEDIA_TYPES, "item_reference", "redacted_thinking", "step_start") else ""


def _is_item(value: object) -> bool:
    return is_message(value) or bool(sort_of(value))


def _is_item_for_sure(value: object) -> bool:
    """Return whether a value that may be anything is a message: it has a known role, and content or calls."""
    if not isinstance(value, dict):
        return False
    message = with_role(value)
    if role_of(message.get("role")) not in SPEAKERS:
        return ("toolCallId" in value and sort_of(value) == "call") or set(value) == {"text"}
    contents = [message.get(key) for key in _CONTENTS]
    is_empty = "content" in message and message["content"] is None
    return is_empty or any(isinstance(content, str | list) for content in (*contents, message.get("tool_calls")))


def _item_in(item: object) -> object:
    """Return an item of a list of messages. It may be recorded as a text, or as a pair of its role and its text."""
    item = parsed(item)
    if isinstance(item, list) and len(item) == 2 and role_of(item[0]) in SPEAKERS and isinstance(item[1], str):
        return {"role": item[0], "content": item[1]}
    return item


def is_message(value: object) -> bool:
    """Return whether a value looks like a chat message."""
    return isinstance(value, dict) and isinstance(with_role(value).get("role"), str)


def with_role(value: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its role. Many have a type or an author instead, are in an envelope, or are a constructor call."""
    kind: object = _named_type(value)
    fields: object = value
    if isinstance(value.get("role"), str):
        return value
    if len(value) == 1 and isinstance(inner := next(iter(value.values())), dict) and role_of(next(iter(value))) in SPEAKERS:
        return inner | {"role": role_of(next(iter(value)))}
    for inner in (value[key] for key in ("message", "llm_message", "content") if key in value):
        # A choice holds its message, as an event of one does.
        if isinstance(inner, dict) and isinstance(inner.get("role"), str):
            return dict(inner)
    for holder in (value[key] for key in _ROLE_KEYS if key in value):
        name = holder.get("role", holder.get("label", holder.get("Label"))) if isinstance(holder, dict) else holder
        if role_of(name) in SPEAKERS:
            return value | {"role": role_of(name)}
    if kind == "constructor" and isinstance(value.get("id"), list) and value["id"]:
        kind, fields = value["id"][-1], value.get("kwargs")
    elif isinstance(value.get("data"), dict):
        fields = value["data"]
    if isinstance(fields, dict) and {"content", "message", "text"} & set(fields):
        is_of_autogen = isinstance(value.get("source"), str) and isinstance(kind, str) and kind.endswith(("Message", "Event"))
        if (role := role_of(kind)) in SPEAKERS and (role not in _ONLY_ROLES or str(kind).endswith(("Message", "message"))):
            return fields | {"role": role}
        if is_of_autogen:
            return fields | {"role": "user" if value["source"] == "user" else "assistant"}
    has_calls = isinstance(value.get("tool_calls"), list) and "response" not in value
    return {"role": "assistant"} | value if has_calls else value


@lru_cache(maxsize=1_024)
def _plain_role(name: str) -> str:
    own = [part for part in name.lower().split(".") if part != "message"]
    return re.sub(r"[\W_]+", "", own[-1] if own else "").removesuffix("chunk").removesuffix("message")


def role_of(name: object) -> str:
    """Return the name of a role or of a type of messages, without signs and without what all of them have."""
    return _plain_role(name[:64]) if isinstance(name, str) else ""


def _named_type(block: dict[str, Any]) -> str:
    return next(
        (kind for key in ("type", "part_kind", "kind", "$type", "block_type") if isinstance(kind := block.get(key), str)), ""
    )


@lru_cache(maxsize=1_024)
def _plain_type(kind: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).replace("-", "_").replace(".", "_").lower().removesuffix("_content")


def _type(block: object) -> str:
    return _plain_type(_named_type(block)[:64]) if isinstance(block, dict) else ""


def _own_fields(item: Node, kind: str) -> dict[str, Any]:
    fields = {key: value for key, value in item.object().items() if key not in _BESIDE_A_CALL}
    if kind == "image_generation_call":
        fields.pop("result", None)
    elif kind == "code_interpreter_call" and isinstance(outputs := fields.get("outputs"), list):
        fields["outputs"] = [each for each in outputs if not (isinstance(each, dict) and each.get("type") == "image")]
    return fields


def text_of_block(block: object) -> str | None:
    """Return the text of a block; None if the block is no text, or a thought."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or _type(block) in _THOUGHTS or block.get("thought") is True:
        return None
    kind = _type(block)
    keys = ("text", "refusal", "content") if kind == "text" else ("text", "refusal") if kind or _name_of(block) else _TEXTS
    texts = (block[key].get("value") if isinstance(block.get(key), dict) else block.get(key) for key in keys)
    return next((text for text in texts if isinstance(text, str)), None)


def text_in(value: object) -> str:
    """Return a result as a text: blocks of text one a line, images and sounds as nothing, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(block, dict) for block in value):
        texts = [text_of_block(block) for block in value if {"type", "block_type"} & set(block) or set(block) == {"text"}]
        if len(texts) == len(value) and (any(texts) or all(block.get("type") in _MEDIA_TYPES for block in value)):
            return "\n".join(filter(None, texts))
    is_without_text = value is None or (isinstance(value, dict) and value.get("type") in _MEDIA_TYPES)
    return "" if is_without_text else as_json(value)


def is_error(result: Piece) -> bool:
    """Return whether a result is an error, as ``worker/CONVERT.md`` defines it."""
    if result.is_error or _ERROR.match(result.text):
        return True
    if any(_EXIT.search(part) for part in (result.text[:_EXIT_CHARS], result.text[-_EXIT_CHARS:])):
        return True
    content = parsed(result.text)
    if not isinstance(content, dict):
        return False
    return any(content.get(key) for key in _ERROR_KEYS) or any(map(_has_exit_code, (content, content.get("metadata"))))


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
