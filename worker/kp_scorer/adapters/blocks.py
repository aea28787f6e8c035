"""Reads the blocks of messages: calls of tools, results, thoughts and texts.

A block with a name and arguments is a call, and a block with the id of a call is its result, whatever type they name.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

from kp_scorer.adapters.node import Node, as_json, keys_by_plain_name, parsed
from kp_scorer.adapters.pieces import ERROR_KEYS, Piece, is_failure, utterance
from kp_scorer.adapters.roles import SPEAKERS, named_type, role_of, with_role

_BESIDE_RESULTS: Final = ("structuredContent", "_meta", "tool_name", "raw_input", "raw_output", *ERROR_KEYS)
_MEDIA_TYPES: Final = ("computer_screenshot", "image", "image_url", "input_image", "input_audio")
# All of these are plain names, as ``keys_by_plain_name`` makes them: ``toolcallid`` for ``toolCallId`` and ``tool_call_id``.
_NAMES: Final = ("name", "toolname", "functionname", "apiname", "tool", "function", "toolid", "funcname")
_TOOL_NAMES: Final = {"toolname", "functionname", "apiname"}
_ARGUMENTS: Final = ("arguments", "args", "input", "toolinput", "toolargs", "toolkwargs", "paramdict", "servertoolcall")
_CALL_IDS: Final = ("callid", "tooluseid", "toolcallid", "sourcecallid")
_IDS: Final = (*_CALL_IDS, "id")
# ``response`` was ``result`` in earlier GenAI conventions.
_RETURNED: Final = (
    *("output", "response", "result", "servertoolcallresponse", "content", "observation", "returnvalue", "errortext"),
    "toolreturn",
    "value",
)
_RETURNED_BY_CALLS: Final = ("output", "result", "observation", "aggregatedoutput", "errortext")
_UNFINISHED: Final = ("in_progress", "running", "pending")
_BESIDE_A_RESULT: Final = frozenset("success status is_error isError exit_code exitCode kind type".split())  # noqa: SIM905
_CALL_TYPES: Final = ("function_call", "mcp_call", "custom_tool_call", "tool_call", "server_tool_call")
"""Types of blocks that are calls with a name, like those that end in ``tool_use``. Other types of calls are built in."""
_ENDS_OF_RESULT_TYPES: Final = (
    *("_call_output", "tool_call_response", "tool_result", "tool_return", "tool_response", "function_result"),
    "function_response",
)
_CALL_KEYS: Final = ("functioncall", "tooluse", "toolcall", "toolinvocation")
_RESULT_KEYS: Final = ("functionresponse", "toolresult", "toolcallresult", "tooloutput")
_TEXTS: Final = ("text", "refusal", "value", "Text")
_THOUGHTS: Final = ("reasoning", "thinking", "think")
_BESIDE_A_CALL: Final = frozenset({"id", "call_id", "type", "status", "caller", "namespace"})  # These fields are not arguments.


def is_called(value: object) -> bool:
    """Return whether a value that is marked as a call has the name and the arguments that a call needs."""
    return isinstance(value, dict) and bool(_name_of(value)) and any(key in _ARGUMENTS for key in keys_by_plain_name(value))


def pieces_of_block(block: Node) -> Iterator[Piece]:
    """Yield the pieces of a block that is a thought, a call or a result; other blocks have none.

    Raises NotConverted if a call has no name.
    """
    kind, sort = type_of(block.object()), sort_of(block.value)
    if sort == "call":
        thought = block.value.get("thought")
        yield from utterance(block, "agent", text_in(thought) if thought and thought is not True else "")
        yield from call_and_result(block)
    elif sort == "result":
        inner = _inner(block, _RESULT_KEYS)
        yield result_of(inner, inner.like(*_RETURNED))._replace(call_id=_id_of(inner) or _id_of(block))
    elif sort == "thought":
        thoughts = (text_in(block.at(key).value) for key in ("summary", "content", "text", *_THOUGHTS) if block.at(key).value)
        yield from utterance(block, "agent", "\n".join(thoughts))
    elif sort == "built-in call":
        yield Piece(block, "call", name=kind.removesuffix("_call"), arguments=_own_fields(block, kind), call_id=_id_of(block))
    elif not sort and is_called(block.value):
        # Among the blocks of a message, only a call has a name and arguments.
        yield from call_and_result(block)
    elif not sort:
        block.skip()


def call_of(call: Node) -> Piece:
    """Return the call that a block is, or holds; raise NotConverted if it has no name."""
    inner = _inner(call, _CALL_KEYS)
    kind = str(inner.value.get("type")) if isinstance(inner.value, dict) else ""
    if not _name_of(inner.object()) and kind.startswith("tool-"):
        # The AI SDK puts the name of the tool into the type of the part.
        return Piece(
            call, "call", name=kind.removeprefix("tool-"), arguments=inner.like(*_ARGUMENTS).value, call_id=_id_of(inner)
        )
    if "command" in inner.value and not _name_of(inner.value):
        return Piece(
            call, "call", name=type_of(inner.value), arguments={"command": inner.value["command"]}, call_id=_id_of(inner)
        )
    function = inner if _name_of(inner.value) else inner.like("function", "custom")
    arguments = function.like(*_ARGUMENTS, "parameters").value
    return Piece(call, "call", name=_name(function).required_text(), arguments=arguments, call_id=_id_of(inner) or _id_of(call))


def call_and_result(call: Node) -> Iterator[Piece]:
    """Yield a call, and its result if it is recorded beside the arguments."""
    piece, inner = call_of(call), _inner(call, _CALL_KEYS)
    yield piece
    error = inner.at("error")
    returned = error if error.value and error.value is not True else inner.like(*_RETURNED_BY_CALLS)
    if returned.value is not None and inner.at("status").value not in _UNFINISHED:
        yield result_of(inner, returned)._replace(
            call_id=piece.call_id, is_error=result_of(inner, returned).is_error or returned is error
        )


def _inner(block: Node, keys: Iterable[str]) -> Node:
    """Return the object within a block that has the fields of a call or a result; the block itself if no object has."""
    names = keys_by_plain_name(block.object())
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
    names = keys_by_plain_name(fields)
    return next((name for key in _NAMES if key in names and isinstance(name := fields[names[key]], str) and name), "")


def _name(holder: Node) -> Node:
    """Return the field with the name of a tool, so that an error can name the field."""
    names = keys_by_plain_name(holder.object())
    texts = (holder.at(names[key]) for key in _NAMES if key in names and isinstance(holder.value[names[key]], str))
    return next(texts, holder.at(_NAMES[0]))


def _id_of(holder: Node) -> str:
    value = holder.like(*_IDS).value if isinstance(holder.value, dict) else None
    return value if isinstance(value, str) else ""


def result_of(holder: Node, content: Node) -> Piece:
    """Return the result that an object reports, with the given content as its text."""
    text, is_error = returned_in(content.value)
    fields = holder.object()
    if isinstance(error := fields.get("error"), str | dict) and error:
        is_error = True
        text = text or str(error.get("message") or as_json(error) if isinstance(error, dict) else error)
    is_error = is_error or is_failure(fields) or type_of(fields) == "retry_prompt"
    return Piece(holder, "result", text, _name_of(fields), call_id=_id_of(holder), is_error=is_error)


def returned_in(value: object) -> tuple[str, bool]:
    """Return the text of a result without the envelopes of protocols, and whether an envelope marks it as an error."""
    if isinstance(value, list) and len(value) == 1 and sort_of(value[0]) == "result":
        value = value[0]
    if isinstance(value, dict):
        names = keys_by_plain_name(value)
        if key := next((names[each] for each in _RESULT_KEYS if each in names and isinstance(value[names[each]], dict)), ""):
            return returned_in(value[key])
        fields, is_error = set(value), is_failure(value)
        if fields == {"Text"}:
            return text_in(value["Text"]), False
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
    kind, names, function = type_of(block), keys_by_plain_name(block), block.get("function")
    if isinstance(block.get("state"), dict):
        names = keys_by_plain_name(block["state"]) | names
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
    if any(isinstance(block.get(names.get(key)), dict) for key in _CALL_KEYS):
        return "call"
    if any(isinstance(block.get(names.get(key)), dict) for key in _RESULT_KEYS):
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
    if (kind or set(block) in ({"text"}, {"Text"})) and text_of_block(block) is not None:
        return "text"
    return "left out" if kind in (*_MEDIA_TYPES, "item_reference", "redacted_thinking", "step_start") else ""


@lru_cache(maxsize=1_024)
def _plain_type(kind: str) -> str:
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).replace("-", "_").replace(".", "_").lower()
    return snake_case.removesuffix("_content").removesuffix("_message")


def type_of(block: object) -> str:
    """Return the type of a block in snake case; empty if it has none."""
    return _plain_type(named_type(block)[:64]) if isinstance(block, dict) else ""


def _own_fields(item: Node, kind: str) -> dict[str, Any]:
    fields = {key: value for key, value in item.object().items() if key not in _BESIDE_A_CALL}
    if kind == "image_generation_call":
        fields.pop("result", None)
    elif kind == "code_interpreter_call" and isinstance(outputs := fields.get("outputs"), list):
        fields["outputs"] = [each for each in outputs if not (isinstance(each, dict) and each.get("type") == "image")]
    return fields


def text_of_block(block: object) -> str | None:
    """Return the text of a block; None if the block has no text, or is a thought."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or type_of(block) in _THOUGHTS or block.get("thought") is True:
        return None
    kind = type_of(block)
    if kind == "document" and isinstance(block.get("document"), dict):
        # Cohere's results of tools have this form.
        return text_in(block["document"].get("data"))
    keys = (
        ("text", "refusal", "content", "Text") if kind == "text" else ("text", "refusal") if kind or _name_of(block) else _TEXTS
    )
    texts = (block[key].get("value") if isinstance(block.get(key), dict) else block.get(key) for key in keys)
    return next((text for text in texts if isinstance(text, str)), None)


def text_in(value: object) -> str:
    """Return a result as a text: each block of text on a line, nothing for images and sounds, JSON for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(block, dict) for block in value):
        texts = [text_of_block(block) for block in value if {"type", "block_type"} & set(block) or set(block) == {"text"}]
        if len(texts) == len(value) and (any(texts) or all(block.get("type") in _MEDIA_TYPES for block in value)):
            return "\n".join(filter(None, texts))
    is_without_text = value is None or (isinstance(value, dict) and value.get("type") in _MEDIA_TYPES)
    return "" if is_without_text else as_json(value)
