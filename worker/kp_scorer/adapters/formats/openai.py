"""Conversations of any tool: the messages of Chat Completions, the items of the Responses API, and anything like them.

A source is an object with ``messages``, and with ``choices`` where the answer is recorded beside its request; an object with
``input`` and ``output``, which are the fields of the Responses API; a log with ``request`` and ``response``; a line of a batch,
whose other half has the same ``custom_id``; or a list of messages or items alone. Any other object is searched for a list of
turns. Requests to models of Anthropic and Gemini, and their answers, are read from the same fields.

Specifications: https://platform.openai.com/docs/api-reference/chat/create and
https://platform.openai.com/docs/api-reference/responses/object.
"""

from collections.abc import Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import Transcript, pieces_in, pieces_of, pieces_of_message
from kp_scorer.adapters.node import Node, as_json, objects_in
from kp_scorer.adapters.pieces import Piece, has_kind, utterance
from kp_scorer.adapters.roles import SPEAKERS, Speaker, in_one_view, is_message, role_of, with_role
from kp_scorer.adapters.times import first_timestamp, time_in
from kp_scorer.adapters.turns import (
    ANSWERS,
    QUESTIONS,
    are_turns,
    is_exchange,
    is_turn,
    list_of_turns,
    pieces_of_branch,
    without_repeats,
)

_KEYS: Final = frozenset({"messages", "contents", "choices", "candidates", "request", "response", "prompt", "custom_id"})
_REQUESTS: Final = ("request", "request_body", "requestBody", "params", "inputs")
_RESPONSES: Final = ("response", "response_body", "responseBody", "result", "outputs")
_HALVES: Final = (("body", "params", "request"), ("response", "result"))
"""The keys of the two lines of a batch that have the same id."""
_ASKERS: Final = {"human_input", "cost"}  # AG2 writes these fields beside a chat in the view of the agent that asked.
_MOST_INSPECTED: Final = 50
_MOST_LEVELS: Final = 8  # The most lists within each other that are searched for conversations.


def fits(value: object, levels: int = _MOST_LEVELS) -> bool:
    """Return whether a source is a conversation, or a list of messages or of conversations, nested in this many levels."""
    if isinstance(value, list):
        return are_turns(value) or (levels > 0 and any(fits(item, levels - 1) for item in value[:_MOST_INSPECTED]))
    if not isinstance(value, dict) or is_turn(value):
        return False
    is_of_responses = (
        isinstance(value.get("output"), list) or are_turns(value.get("input")) or {"input", "output"} <= set(value)
    )
    is_alone = bool(_KEYS & set(value)) or is_of_responses or _has_both(value) or is_exchange(value)
    source = Node(1, "", value)
    return is_alone or list_of_turns(source) is not None or bool(levels > 0 and _lists_of_conversations(source, levels - 1))


def _has_both(value: dict[str, Any]) -> bool:
    """Return whether an object has a request and its response."""
    return any(key in value for key in _REQUESTS) and any(key in value for key in _RESPONSES)


def run_id(conversation: Node) -> str | None:
    """Return the id that a request of a batch shares with its response; None for a conversation that is in no batch."""
    value = conversation.value
    return conversation.at("custom_id").text() or None if isinstance(value, dict) and "custom_id" in value else None


def ends(conversations: Sequence[Node]) -> int | None:
    """Return 0, for a complete run, once both halves of a conversation in a batch are there, or one half twice; else None."""
    return 0 if len(conversations) > 1 or all(_halves(conversations[0])) else None


def _halves(conversation: Node) -> list[bool]:
    return [any(key in conversation.object() for key in keys) for keys in _HALVES]


def records(source: Node) -> list[Node]:
    """Return the conversations in a source: itself if it is one, or those in its lists."""
    if isinstance(source.value, list):
        is_alone = any(is_message(each) or isinstance(each.get("type"), str) for each in objects_in(source.value))
        return [source] if is_alone or are_turns(source.value) else [each for item in source.items() for each in records(item)]
    if isinstance(source.value, dict) and source.value.keys() == {"json"}:
        # The source is an item of n8n.
        return records(source.at("json"))
    if rows := _rows(source):
        return [each for row in rows for each in records(row)]
    if not isinstance(source.value, dict) or _KEYS & set(source.value) or list_of_turns(source) or is_exchange(source.value):
        return [source]
    return [each for inner in _lists_of_conversations(source) for item in inner.items() for each in records(item)] or [source]


def _rows(source: Node) -> list[Node]:
    """Return the rows of a table that pandas wrote, or several runs that an object holds by their ids or in one list."""
    fields = source.value if isinstance(source.value, dict) else {}
    columns, lists, cells = fields.get("columns"), fields.get("data"), list(fields.values())
    numbers = cells[0].keys() if cells and isinstance(cells[0], dict) else set[str]()
    are_columns = bool(numbers) and all(isinstance(cell, dict) and cell.keys() == numbers for cell in cells)
    rows: list[Any] = []
    if isinstance(columns, list) and isinstance(lists, list) and all(isinstance(row, list) for row in lists):
        rows = [dict(zip(map(str, columns), row, strict=False)) for row in lists]
    elif are_columns and all(map(str.isdecimal, numbers)):
        rows = [{name: cell[number] for name, cell in fields.items()} for number in numbers]
    elif not (_KEYS & set(fields) or _has_both(fields) or is_exchange(fields)):
        held = (list_of_turns(source._replace(value=cell)) if isinstance(cell, dict) else None for cell in cells)
        by_ids = all(turns and _is_asked(turns.value) for turns in held)
        # The same question again is another view of the same run, such as another agent's.
        by_ids = by_ids or (all(map(_is_asked, cells)) and len({as_json(cell[0]) for cell in cells}) == len(cells))
        lists_of_lists = (cell for cell in cells if isinstance(cell, list) and len(cell) > 1 and all(map(_is_asked, cell)))
        rows = cells if by_ids else next(lists_of_lists, [])
    return [source._replace(path=str(number), value=row) for number, row in enumerate(rows)] if len(rows) > 1 else []


def _is_asked(turns: object) -> bool:
    """Return whether a value is a list of turns with a message of the user."""
    roles = (role_of(with_role(turn).get("role")) for turn in objects_in(turns))
    return any(SPEAKERS.get(role) == "user" for role in roles) and are_turns(turns)


def _lists_of_conversations(source: Node, levels: int = _MOST_LEVELS) -> list[Node]:
    """Return the lists of conversations that an object holds, as logs of evaluations do."""
    lists = [source._replace(path=key, value=value) for key, value in source.object().items() if isinstance(value, list)]
    return [each for each in lists if any(fits(item, levels) for item in objects_in(each.value[:_MOST_INSPECTED]))]


def run(_own_id: str, conversations: Sequence[Node]) -> Run:
    """Make a run of a conversation."""
    conversation = conversations[0]
    if len(conversations) > 1:
        if any(sum(halves) > 1 for halves in zip(*map(_halves, conversations), strict=True)):
            raise conversation.refusal("expected one request and one response with its custom_id: convert each batch by itself")
        conversation = conversation._replace(value={key: each.value[key] for each in conversations for key in each.object()})
    if isinstance(conversation.value, list):
        turns = conversation.items()
        run_id = trace_id("openai", "", conversation.value)
        return Run(conversation, run_id, _pieces_of_turns(turns), first_timestamp(turns[:1]))
    listed = list_of_turns(conversation) if not _KEYS & set(conversation.object()) else None
    turns = listed.items() if listed else []
    if listed and "chat_history" in conversation.value and _ASKERS & set(conversation.value):
        turns = listed._replace(value=in_one_view(listed.value, is_of_asker=True)).items()
    pieces = _pieces_of_turns(turns)
    request, response = _body(conversation, _REQUESTS), _body(conversation, _RESPONSES)
    asked = _pieces(_first(request, "messages", "input"), "user") if not has_kind(pieces, "user") else []
    if not asked and not has_kind(pieces, "user"):
        texts = (text for text in conversation.all_plain(*QUESTIONS) if isinstance(text.value, str) and text.value)
        asked = next((utterance(text, "user", text.value) for text in texts), [])
    pieces = _joined(_joined(asked, pieces), _answer(conversation, response))
    if not pieces:
        raise conversation.refusal("expected a list of messages, or an object with messages, or with input and output")
    created_at = time_in(response) or time_in(conversation) or first_timestamp(turns[:1])
    return Run(conversation, trace_id("openai", "", conversation.value), list(without_repeats(pieces)), created_at)


def _answer(conversation: Node, response: Node) -> list[Piece]:
    answer = _first(response, "choices", "output", "candidates", "artifacts")
    if answer is not response and answer.path.endswith("choices"):
        # Clients use the first of several choices.
        return [piece for choice in answer.items()[:1] for piece in pieces_of_message(choice.at("message"))]
    if answer is conversation:
        answer = conversation.at_plain(*ANSWERS)
        answer = answer if is_exchange(conversation.object()) or isinstance(answer.value, str) else conversation
    return _pieces(answer, "agent") if answer is not conversation else []


def _joined(asked: list[Piece], answered: list[Piece]) -> list[Piece]:
    """Join a question and its answer. Many logs repeat the answer among the messages, or the messages in the answer."""
    before, after = ([(piece.kind, piece.text.strip(), piece.name) for piece in pieces] for pieces in (asked, answered))
    if after[: len(before)] == before:
        return answered
    return asked if before[len(before) - len(after) :] == after else asked + answered


def _pieces_of_turns(turns: Sequence[Node]) -> list[Piece]:
    times = [turn.value.get("created_at") if isinstance(turn.value, dict) else None for turn in turns]
    if all(isinstance(time, int) for time in times) and times != sorted(times, key=int) == times[::-1]:  # type: ignore[arg-type]
        # Some services list the newest message first.
        turns = turns[::-1]
    return pieces_of_branch(turns, ("id", "parent"))


def _body(conversation: Node, keys: Sequence[str]) -> Node:
    """Return the request or the response in a log or in the body of a batch; without one, the conversation itself."""
    message = conversation.first(*keys).parsed()
    message = message if isinstance(message.value, str | list | dict) else conversation
    body = message.at("body").parsed() if isinstance(message.value, dict) else message
    return body if isinstance(body.value, dict) else message


def _first(message: Node, *keys: str) -> Node:
    value = message.first(*keys) if isinstance(message.value, dict) else message
    return message if value.value is None else value


def _pieces(node: Node, speaker: Speaker, levels: int = 3) -> list[Piece]:
    """Return the pieces in a question or an answer; raise NotConverted if a list of messages has an item that is none."""
    content = node.parsed()
    items = content.items() if node.path.endswith("messages") else []
    if any(not isinstance(item.value, str | list) and not is_turn(item.value) for item in items):
        # Anything that is not a message is refused here; among other turns it would be skipped.
        return [piece for message in items for piece in pieces_of_message(message)]
    pieces = pieces_in(content, speaker, Transcript(), is_model=True)
    if pieces is None and isinstance(content.value, list):
        return list(pieces_of(content.items()))
    if pieces is None and isinstance(content.value, dict) and levels:
        inner = (
            _pieces(content.at(key), speaker, levels - 1) for key, value in content.value.items() if isinstance(value, dict)
        )
        return next(filter(None, inner), [])
    return pieces or []


FORMAT = Format(fits, run, records, run_id, ends=ends, is_general=True, has_chats=True, has_ids_of_files=True)
