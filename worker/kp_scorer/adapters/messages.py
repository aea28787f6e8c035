"""Reads the messages of a run in any format: their speakers, their contents, and lists of messages that repeat others.

One reader serves all formats. It recognises messages by shape: OpenAI's chats and items of the Responses API, Anthropic's
blocks, Gemini's contents, messages of LangChain and AutoGen, parts of the AI SDK, of Bedrock and of the GenAI conventions. A
format only finds the inputs and outputs of models and agents.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from kp_scorer.adapters.blocks import (
    block_kind,
    call_and_result,
    call_of,
    is_called,
    pieces_of_block,
    result_of,
    stated_type,
    text_in,
    text_of_block,
)
from kp_scorer.adapters.node import Node, parsed
from kp_scorer.adapters.pieces import Piece, utterance
from kp_scorer.adapters.roles import ONLY_ROLES, SPEAKERS, Speaker, in_one_view, is_message, role_of, with_role
from kp_scorer.errors import NotConverted

_CONTENTS: Final = "parts content blocks items text message value data tool_results Items Content".split()  # noqa: SIM905
_BEFORE_CONTENT: Final = ("reasoning_content", "tool_plan")
"""The fields with the thoughts of an agent before it answered, or before it called tools."""
_LISTS_OF_CALLS: Final = ("toolcalls", "toolrequests", "toolinvocations")
_ALTERNATIVES: Final = ("choices", "candidates", "generations")  # A request may have several answers. Clients use the first.
_HOLDERS: Final = {  # The keys of a request, and of an answer, that hold its messages or its text.
    "user": (
        *("messages", "contents", "new_message", "input", "prompt", "question", "query", "instruction", "task", "description"),
        *("message", "content", "kwargs"),
    ),
    "agent": (*_ALTERNATIVES, *"messages output message content response answer result raw text input".split()),  # noqa: SIM905
}
_ANSWER_FIELDS: Final = {"toolCalls", "tool_calls", "finishReason", "finish_reason", "usage"}
_DEFINITION_FIELDS: Final = {"function", "input_schema", "inputSchema", "parameters"}
"""The fields of a tool's definition, which some exporters record among the messages."""
_TRANSCRIPT: Final = re.compile(
    r"^(system|developer|user|human|assistant|ai|tool|function response): ", re.MULTILINE | re.IGNORECASE
)
_END_OF_TEXT: Final = "<|endoftext|>"


class Transcript:
    """Reads lists of messages, each of which may begin with the previous list, without reading a message twice."""

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
    """Return the pieces in an input or output that is messages, an object that holds messages, or a text; else None.

    With ``is_model``, every object with a role is a message, an answer may lack its role, and a message that cannot be read
    raises NotConverted. Without ``is_model``, inputs and outputs may be anything.
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
            return list(pieces_of(content._replace(value=message) for message in messages_in(value)))
        return None if value.lstrip().startswith(("{", "[")) else utterance(content, speaker, value)
    if isinstance(value, list) and value:
        # LangChain's models get a list of conversations, and each event has a list of one answer.
        if len(value) == 1 and isinstance(value[0], list | dict) and not _is_item(_item_in(value[0])):
            return _pieces_in(content.items()[0], speaker, transcript, is_model=is_model)
        if not is_model and not any(_is_item_for_sure(_item_in(item)) for item in value):
            return None
        # Among messages, a block of an unknown type is allowed, and has no pieces.
        is_chat = any(is_message(_item_in(item)) for item in value)
        return transcript.pieces(content, speaker, lambda item: _is_item(item) or (is_chat and stated_type(item) != ""))
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
    """Return the pieces that an object without a role holds under a key of requests or answers; None if it holds none."""
    fields = content.object()
    if "role" in fields:
        return None
    if fields == {"content": "role"}:
        # An exporter has taken a message for a list, and recorded only the first of its keys.
        return []
    for key in _HOLDERS[speaker]:
        inner = content.at(key).parsed()
        while key in _ALTERNATIVES and isinstance(inner.value, list) and inner.value:
            inner = inner.items()[0]
        # A text beside other fields may be only a part of the output of a model.
        is_part = is_model and speaker == "agent" and isinstance(inner.value, str) and len(fields) > 1
        pieces = None if is_part or inner.value is None else _pieces_in(inner, speaker, transcript, is_model=is_model)
        if pieces is not None:
            return pieces
    return None


def messages_in(transcript: str) -> list[dict[str, str]]:
    """Return the messages in a text, each of which begins with its role; none if the text begins otherwise."""
    before, *parts = _TRANSCRIPT.split(transcript)
    texts = (text.strip().removesuffix(_END_OF_TEXT).strip() for text in parts[1::2])
    messages = [{"role": role, "content": text} for role, text in zip(parts[::2], texts, strict=True) if text != "None"]
    return [] if before.strip() else messages


def pieces_of(items: Iterable[Node], speaker: Speaker = "agent") -> Iterator[Piece]:
    """Yield the pieces in messages, and in items that some APIs list among the messages in place of blocks within them.

    A message whose role is unknown, such as the name of a tool, is a result if it follows a call.
    """
    has_called = False
    items = list(items)
    values = in_one_view([item.value for item in items])
    for item in (item._replace(value=value) for item, value in zip(items, values, strict=True)):
        if is_message(item.value) and (role_of(with_role(item.value)["role"]) in SPEAKERS or block_kind(item.value) != "call"):
            pieces = list(pieces_of_message(item, "tool" if has_called else ""))
        elif text := text_of_block(item.value):
            pieces = utterance(item, speaker, text)
        elif isinstance(item.value, dict) and isinstance(item.value.get("parts"), list):
            pieces = list(pieces_of(item.at("parts").items(), speaker))
        else:
            pieces = list(pieces_of_block(item))
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
    kinds = {block_kind(block.value) for block in content.each()}
    if role in ONLY_ROLES and speaker == "agent" and all(is_called(each.value) for each in content.parsed().each()):
        yield from map(call_of, content.parsed().each())
    elif speaker == "agent":
        yield from _pieces_of_answer(message, content)
    elif speaker == "user":
        yield from _pieces_of_content(message, "user", content)
    elif speaker and kinds & {"call", "result"}:
        yield from _pieces_of_content(message, "result", content)
    elif speaker == "result":
        is_definition = isinstance(content.value, dict) and bool(_DEFINITION_FIELDS & set(content.value))
        if message.at("tool_call_id").value or not is_definition:
            yield result_of(message, content)


def _content_of(message: Node) -> Node:
    """Return the content of a message without its envelopes."""
    content = _first_content(message)
    while isinstance(content.value, dict) and not block_kind(content.value) and any(key in content.value for key in _CONTENTS):
        content = _first_content(content)
    return content


def _first_content(message: Node) -> Node:
    contents = (message.at(key) for key in _CONTENTS if message.value.get(key) not in (None, "", []))
    return next(contents, message.first(*_CONTENTS))


def _pieces_of_answer(message: Node, content: Node) -> Iterator[Piece]:
    for key in _BEFORE_CONTENT:
        yield from utterance(message, "agent", text_in(message.at(key).value))
    if content.value in (None, "", []):
        content = message.at("refusal")
    in_content = list(_pieces_of_content(message, "agent", content))
    yield from in_content
    ids = {piece.call_id for piece in in_content if piece.kind == "call"}
    # LangChain lists calls again even if they are blocks of the content. OpenAI's earlier messages have one call, and no list.
    wrapped = message.at("additional_kwargs") if isinstance(message.value.get("additional_kwargs"), dict) else message
    calls = message.at_plain(*_LISTS_OF_CALLS).parsed().items() or wrapped.at("tool_calls").items()
    calls = calls or [each for each in (message.at("function_call"), wrapped.at("function_call")) if each.value is not None][:1]
    for call in calls:
        pieces = list(call_and_result(call))
        if pieces[0].call_id not in ids or not ids:
            yield from pieces
    results = message.at("tool_results")
    if isinstance(results.value, dict):
        # The results are listed by the ids of their calls.
        yield from (piece for call_id in results.value for piece in pieces_of_block(results.at(call_id)))


def _pieces_of_content(message: Node, kind: Speaker, content: Node) -> Iterator[Piece]:
    """Yield the pieces in a text or in a list of blocks. Texts with nothing but images between them are one piece."""
    if block_kind(content.value):
        content = content._replace(value=[content.value])
    if not isinstance(content.value, list):
        if not isinstance(content.value, str | None):
            raise content.refusal("expected a text or a list of parts")
        yield from utterance(message, kind, content.text())
        return
    texts: list[str] = []
    for block in content.items():
        if (text := text_of_block(block.value)) is not None:
            texts.append(text)
        elif pieces := list(pieces_of_block(block)):
            yield from utterance(message, kind, "\n".join(filter(None, texts)))
            yield from pieces
            texts.clear()
    yield from utterance(message, kind, "\n".join(filter(None, texts)))


def _blocks_in(content: Node) -> Node:
    """Return a content as a list of blocks if it is a text with the JSON of one; else unchanged."""
    blocks = content.parsed()
    are_blocks = isinstance(blocks.value, list) and bool(blocks.value) and all(map(block_kind, blocks.value))
    return blocks if are_blocks else content


def _is_item(value: object) -> bool:
    return is_message(value) or bool(block_kind(value))


def _is_item_for_sure(value: object) -> bool:
    """Return whether a value that may be anything is a message: it has a known role, and content or calls."""
    if not isinstance(value, dict):
        return False
    message = with_role(value)
    if role_of(message.get("role")) not in SPEAKERS:
        return ("toolCallId" in value and block_kind(value) == "call") or set(value) == {"text"}
    contents = [message.get(key) for key in _CONTENTS]
    is_empty = "content" in message and message["content"] is None
    return is_empty or any(isinstance(content, str | list) for content in (*contents, message.get("tool_calls")))


def _item_in(item: object) -> object:
    """Return an item of a list of messages as an object, if it is recorded as JSON, or as a pair of its role and its text."""
    item = parsed(item)
    if isinstance(item, list) and len(item) == 2 and role_of(item[0]) in SPEAKERS and isinstance(item[1], str):
        return {"role": item[0], "content": item[1]}
    return item
