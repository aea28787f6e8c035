"""Reads the blocks of messages: calls of tools, results, thoughts and texts.

A block with a name and arguments is a call, and a block with the id of a call is its result, whatever type they name.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, Literal

from kp_scorer.adapters.node import Node, as_json, keys_by_plain_name, parsed
from kp_scorer.adapters.pieces import ERROR_KEYS, Piece, is_failure, utterance
from kp_scorer.adapters.roles import SPEAKERS, named_type, role_of, with_role

BlockKind = Literal["call", "built-in call", "result", "thought", "text", "left out", ""]

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
    "output response result servertoolcallresponse content observation returnvalue errortext toolreturn value".split()  # noqa: SIM905
)
_RETURNED_BY_CALLS: Final = ("output", "result", "observation", "aggregatedoutput", "errortext")
_UNFINISHED: Final = ("in_progress", "running", "pending")
_BESIDE_A_RESULT: Final = frozenset("success status is_error isError exit_code exitCode kind type".split())  # noqa: SIM905
_CALL_TYPES: Final = ("function_call", "mcp_call", "custom_tool_call", "tool_call", "server_tool_call")
"""Types of blocks that are calls with a name, like those that end in ``tool_use``. Other types of calls are built in."""
_ENDS_OF_RESULT_TYPES: Final = tuple(
    "_call_output tool_call_response tool_result tool_return tool_response function_result function_response".split()  # noqa: SIM905
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
    match block_kind(block.object()):
        case "call":
            thought = block.value.get("thought")
            yield from utterance(block, "agent", text_in(thought) if thought and thought is not True else "")
            yield from call_and_result(block)
        case "result":
            inner = _inner(block, _RESULT_KEYS)
            yield result_of(inner, inner.at_plain(*_RETURNED))._replace(call_id=_id_of(inner) or _id_of(block))
        case "thought":
            thoughts = (block.at(key).value for key in ("summary", "content", "text", *_THOUGHTS))
            yield from utterance(block, "agent", "\n".join(map(text_in, filter(None, thoughts))))
        case "built-in call":
            yield _built_in_call(block)
        case "" if is_called(block.value):
            # Among the blocks of a message, only a call has a name and arguments.
            yield from call_and_result(block)
        case "":
            block.skip()


def _built_in_call(block: Node) -> Piece:
    """Return the call of a provider's own tool, which the type of the block names; images are not among its arguments."""
    type_name = stated_type(block.value)
    arguments = {key: value for key, value in block.value.items() if key not in _BESIDE_A_CALL}
    if type_name == "image_generation_call":
        arguments.pop("result", None)
    elif type_name == "code_interpreter_call" and isinstance(outputs := arguments.get("outputs"), list):
        arguments["outputs"] = [each for each in outputs if not (isinstance(each, dict) and each.get("type") == "image")]
    return Piece(block, "call", name=type_name.removesuffix("_call"), arguments=arguments, call_id=_id_of(block))


def call_of(call: Node) -> Piece:
    """Return the call that a block is, or holds; raise NotConverted if it has no name."""
    inner = _inner(call, _CALL_KEYS)
    call_id = _id_of(inner) or _id_of(call)
    is_named, type_name = bool(_name_of(inner.value)), str(inner.value.get("type"))
    if not is_named and type_name.startswith("tool-"):
        # The AI SDK puts the name of the tool into the type of the part.
        name, arguments = type_name.removeprefix("tool-"), inner.at_plain(*_ARGUMENTS).value
    elif not is_named and "command" in inner.value:
        name, arguments = stated_type(inner.value), {"command": inner.value["command"]}
    else:
        function = inner if is_named else inner.at_plain("function", "custom")
        name, arguments = function.at_plain(*_NAMES).required_text(), function.at_plain(*_ARGUMENTS, "parameters").value
    return Piece(call, "call", name=name, arguments=arguments, call_id=call_id)


def call_and_result(call: Node) -> Iterator[Piece]:
    """Yield a call, and its result if it is recorded beside the arguments."""
    piece, inner = call_of(call), _inner(call, _CALL_KEYS)
    yield piece
    error = inner.at("error")
    has_error = bool(error.value) and error.value is not True
    returned = error if has_error else inner.at_plain(*_RETURNED_BY_CALLS)
    if returned.value is not None and inner.at("status").value not in _UNFINISHED:
        result = result_of(inner, returned)
        yield result._replace(call_id=piece.call_id, is_error=result.is_error or has_error)


def _inner(block: Node, keys: Iterable[str]) -> Node:
    """Return the object within a block that has the fields of a call or a result; the block itself if no object has."""
    key = _key_of_object(block.object(), keys)
    inner = block.at(key) if key else block
    for key in ("value", "state", "run"):
        if isinstance(nested := inner.value.get(key), dict):
            inner = inner._replace(value=nested | {name: value for name, value in inner.value.items() if name != key})
    if len(inner.value) == 1 and isinstance(nested := next(iter(inner.value.values())), dict) and "args" in nested:
        # Here the key is the name of the tool.
        inner = inner._replace(value={"name": next(iter(inner.value)), **nested})
    return inner


def _key_of_object(fields: dict[str, Any], plain_names: Iterable[str]) -> str:
    """Return the key of the first of these plain names that has an object as its value; empty if there is none."""
    keys = keys_by_plain_name(fields)
    return next((keys[name] for name in plain_names if name in keys and isinstance(fields[keys[name]], dict)), "")


def _name_of(fields: dict[str, Any]) -> str:
    """Return the name of the tool in a call or a result; empty if it has none."""
    names = keys_by_plain_name(fields)
    return next((name for key in _NAMES if key in names and isinstance(name := fields[names[key]], str) and name), "")


def _id_of(holder: Node) -> str:
    value = holder.at_plain(*_IDS).value
    return value if isinstance(value, str) else ""


def result_of(holder: Node, content: Node) -> Piece:
    """Return the result that an object reports, with the given content as its text."""
    text, is_error = returned_in(content.value)
    fields = holder.object()
    if isinstance(error := fields.get("error"), str | dict) and error:
        is_error = True
        text = text or str(error.get("message") or as_json(error) if isinstance(error, dict) else error)
    is_error = is_error or is_failure(fields) or stated_type(fields) == "retry_prompt"
    return Piece(holder, "result", text, _name_of(fields), call_id=_id_of(holder), is_error=is_error)


def returned_in(value: object) -> tuple[str, bool]:
    """Return the text of a result without the envelopes of protocols, and whether an envelope marks it as an error."""
    if isinstance(value, list) and len(value) == 1 and block_kind(value[0]) == "result":
        value = value[0]
    if not isinstance(value, dict):
        return text_in(value), False
    if key := _key_of_object(value, _RESULT_KEYS):
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
        blocks = value[key] if filled == {key} else None
        if isinstance(blocks, str) or (isinstance(blocks, list) and all(block_kind(block) == "text" for block in blocks)):
            return text_in(value[key]), is_error
    return text_in(value), False


def block_kind(block: object) -> BlockKind:
    """Return the kind of a block by its type and its fields; empty for anything that is no block of a message."""
    if not isinstance(block, dict):
        return ""
    type_name, names, function = stated_type(block), keys_by_plain_name(block), block.get("function")
    if isinstance(block.get("state"), dict):
        names = keys_by_plain_name(block["state"]) | names
    # In Chat Completions a call has arguments, and the definition of a tool has none.
    is_of_function = isinstance(function, dict) and {"name", "arguments"} <= set(function)
    has_call_id = any(key in names for key in _CALL_IDS)
    has_arguments = any(key in names for key in _ARGUMENTS)
    is_named = bool(_name_of(block)) or (has_call_id and type_name.startswith("tool_"))
    # A name and an input are not enough, because other objects may have them, too.
    is_of_tool = (
        has_call_id
        or bool(_TOOL_NAMES & set(names))
        or any(word in type_name for word in ("tool", "call", "function"))
        or (not type_name and "id" in names)
    )
    if any(isinstance(block.get(names.get(key)), dict) for key in _CALL_KEYS):
        return "call"
    if any(isinstance(block.get(names.get(key)), dict) for key in _RESULT_KEYS):
        return "result"
    if type_name in _THOUGHTS or block.get("thought") is True:
        return "thought"
    if {"origin", "result"} <= set(block) or type_name.endswith(_ENDS_OF_RESULT_TYPES):
        return "result"
    is_call = is_of_function or (is_named and has_arguments and is_of_tool) or (is_named and "tool_invocation" in type_name)
    is_command = "command" in names and "exitcode" in names
    if is_call or is_command or type_name in _CALL_TYPES or type_name.endswith("tool_use"):
        return "call"
    if has_call_id and not has_arguments and any(key in names for key in _RETURNED):
        return "result"
    if type_name.endswith("_call"):
        return "built-in call"
    if (type_name or set(block) in ({"text"}, {"Text"})) and text_of_block(block) is not None:
        return "text"
    return "left out" if type_name in (*_MEDIA_TYPES, "item_reference", "redacted_thinking", "step_start") else ""


@lru_cache(maxsize=1_024)
def _plain_type(name: str) -> str:
    snake_case = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").replace(".", "_").lower()
    return snake_case.removesuffix("_content").removesuffix("_message")


def stated_type(block: object) -> str:
    """Return the type of a block in snake case; empty if it has none."""
    return _plain_type(named_type(block)[:64]) if isinstance(block, dict) else ""


def text_of_block(block: object) -> str | None:
    """Return the text of a block; None if the block has no text, or is a thought."""
    if isinstance(block, str):
        return block
    if not isinstance(block, dict) or stated_type(block) in _THOUGHTS or block.get("thought") is True:
        return None
    type_name = stated_type(block)
    if type_name == "document" and isinstance(block.get("document"), dict):
        # Cohere's results of tools have this form.
        return text_in(block["document"].get("data"))
    keys: tuple[str, ...] = _TEXTS
    if type_name == "text":
        keys = ("text", "refusal", "content", "Text")
    elif type_name or _name_of(block):
        keys = ("text", "refusal")
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
