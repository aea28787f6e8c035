"""Finds the turns of a run in any object, through envelopes and lists, and makes messages of them.

A turn is a message, or a call, result or thought by itself; a step, which has a thought, an act and an observation of the
agent; or an exchange, which has a question and its answer.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.blocks import block_kind
from kp_scorer.adapters.messages import messages_in, pieces_of
from kp_scorer.adapters.node import Node, as_json, keys_by_plain_name, objects_in, parsed
from kp_scorer.adapters.pieces import Piece, has_kind
from kp_scorer.adapters.programs import without_program_texts
from kp_scorer.adapters.roles import SPEAKERS, is_message, role_of, with_role

_ENVELOPES: Final = ("payload", "data", "event", "message", "item", "part", "update", "content")
_OF_TYPES: Final = ("payload", "data")  # The envelopes that have the type of their contents beside them.
_MOST_LEVELS: Final = 6  # The most envelopes, or objects around a list of turns, that are opened.
_MOST_INSPECTED: Final = 50  # The items of a list that are inspected to see what it holds.
QUESTIONS: Final = (
    "query question instruction prompt input chatinput task problem message user human userinput goal objective intent".split()  # noqa: SIM905
)
ANSWERS: Final = ("answer", "response", "output", "completion", "assistant", "finalanswer", "finalresult")
_TASKS: Final = ("task", "userinput", "instruction", "goal", "objective")
_NUMBERED: Final = re.compile(r"message_\d{1,6}")
"""The keys of the messages of a chat of CAMEL, beside its task."""
_EXCHANGES: Final = ("requests", "turns", "exchanges", "rounds", "history", "chat_history")
_THOUGHTS: Final = ("thought", "thoughts", "reasoning", "modeloutput", "response")
_TOOLS: Final = ("tool", "toolname", "action")
_INPUTS: Final = ("toolinput", "actioninput", "input", "args")
_OBSERVED: Final = ("observation", "observations", "toolresults")


def turn_in(record: Node) -> Node | None:
    """Return the message or the block that a record is, or holds in envelopes; None if there is none."""
    for _ in range(_MOST_LEVELS):
        if not isinstance(record.value, dict):
            return None
        if _is_step(record.value) or (is_exchange(record.value) and not is_message(record.value)):
            return None
        inner = _inner(record)
        is_block = block_kind(record.value) and not (inner and inner.path.endswith(_OF_TYPES) and block_kind(inner.value))
        if is_message(record.value) or is_block or _has_parts(record.value):
            return record
        if inner is None:
            return None
        record = inner
    return None


def _inner(record: Node) -> Node | None:
    """Return the contents of a record's envelope; None if the record has no envelope."""
    return next((record.at(key) for key in _ENVELOPES if isinstance(record.value.get(key), dict)), None)


def is_turn(value: object) -> bool:
    """Return whether an object is a turn, or an envelope of one."""
    return turn_in(Node(1, "", value)) is not None


def turns_of(records: Iterable[Node]) -> Iterator[Node]:
    """Yield the messages and blocks of records that are turns; skip other records."""
    for record in (each._replace(value=_step_in(each.value)) for each in records):
        if turn := turn_in(record):
            yield turn
            continue
        messages: list[dict[str, Any]] = []
        inner: Node | None = record
        while inner and isinstance(inner.value, dict) and not messages:
            messages, inner = _messages_of(inner), _inner(inner)
        yield from (record._replace(value=message) for message in messages)
        if not messages:
            record.skip()


def _flat(step: dict[str, Any]) -> dict[str, Any]:
    """Return a step with the fields of its action as its own."""
    action = step.get("action")
    if not isinstance(action, dict) or "observation" not in step:
        return step
    return step | {key: value for key, value in action.items() if keys_by_plain_name({key: 0}).keys() != {"toolcallid"}}


def _messages_of(record: Node) -> list[dict[str, Any]]:
    """Return the messages that a step or an exchange stands for."""
    record = record._replace(value=_flat(record.value))
    if _is_step(record.value):
        name, arguments = _text(record, _TOOLS), record.at_plain(*_INPUTS)
        calls: object = record.at_plain("toolcalls").value
        if not calls and name:
            calls = [{"name": name, "arguments": arguments.value, "id": ""}]
        observed = record.at_plain(*_OBSERVED).value
        called = {"role": "assistant", "content": _text(record, _THOUGHTS), "tool_calls": calls}
        if not called["content"] and isinstance(record.value.get("llm_response"), dict):
            called["content"] = record.at("llm_response", "content").value
        results = observed if objects_in(observed) else [{"content": observed}] if observed not in (None, "") else []
        answers = (result if block_kind(result) else {"role": "tool", **result} for result in objects_in(results))
        return [called, *answers]
    if is_exchange(record.value):
        asked, answered = record.at_plain(*QUESTIONS).value, record.at_plain(*ANSWERS).value
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [message for message in messages if isinstance(message["content"], str | list | dict)]
    task = record.at_plain(*_TASKS).value
    return [{"role": "user", "content": task}] if isinstance(task, str) and task else []


def _text(record: Node, keys: Sequence[str]) -> str:
    texts = (node.value for node in record.all_plain(*keys))
    return next((text for text in texts if isinstance(text, str) and text), "")


def _has_parts(value: dict[str, Any]) -> bool:
    return any(is_message(part) or block_kind(part) for part in objects_in(value.get("parts")))


def _is_step(value: dict[str, Any]) -> bool:
    value = _flat(value)
    if isinstance(with_role({**value, "tool_calls": None}).get("role"), str):
        return False
    names = set(keys_by_plain_name(value))
    has_call = bool(names & {*_TOOLS, "toolcalls"}) and "toolcallid" not in names
    return has_call and bool(names & {*_OBSERVED, *_THOUGHTS[:-1]})


def is_exchange(value: dict[str, Any]) -> bool:
    """Return whether an object has a question and its answer."""
    names = keys_by_plain_name(value)
    return all(any(key in names and value[names[key]] for key in keys) for keys in (QUESTIONS, ANSWERS))


def are_turns(value: object) -> bool:
    """Return whether a list holds turns of one run."""
    items = [_step_in(parsed(item)) for item in value[:_MOST_INSPECTED]] if isinstance(value, list) else []
    return any(isinstance(item, dict) and (_is_spoken(item) or _is_step(item)) for item in items)


def _step_in(item: object) -> object:
    """Return an item of a list; as a step if it is one of LangChain's pairs of an action and an observation."""
    is_pair = isinstance(item, list) and len(item) == 2 and isinstance(item[0], dict) and "tool" in item[0]
    return {"action": item[0], "observation": item[1]} if is_pair else item  # type: ignore[index]  # a pair


def _is_spoken(item: dict[str, Any]) -> bool:
    turn = turn_in(Node(1, "", item))
    if turn is None or _has_parts(turn.value):
        return turn is not None
    return is_message(turn.value) and role_of(with_role(turn.value)["role"]) in SPEAKERS


def list_of_turns(holder: Node) -> Node | None:
    """Return the list of turns in an object; None if there is none.

    The outermost list wins; among several on one level, a list with messages, and then the longest.
    """
    fields = holder.value if isinstance(holder.value, dict) else {}
    if isinstance(tree := fields.get("mapping"), dict):
        # A chat with branches has its messages in an object, by their ids.
        return holder.at("mapping")._replace(value=list(tree.values()))
    if len(keys := [key for key in fields if _NUMBERED.fullmatch(key) and is_message(fields[key])]) > 1:
        task = holder.first("specified_task", "original_task").value
        asked = [{"role": "user", "content": task}] if isinstance(task, str) else []
        return holder._replace(value=[*asked, *(holder.at(key).value for key in sorted(keys, key=lambda key: (len(key), key)))])
    level: list[tuple[Any, tuple[str | int, ...]]] = [(holder.value, ())]
    for _ in range(_MOST_LEVELS):
        inner = [(parsed(value), (*path, key)) for outer, path in level for key, value in _within(outer)]
        if lists := [each for each in inner if are_turns(each[0]) or _are_exchanges(*each)]:
            _, path = max(reversed(lists), key=lambda each: (any(map(is_message, each[0])), len(each[0])))
            for key in path:
                holder = holder.parsed()
                holder = holder.items()[key] if isinstance(key, int) else holder.at(key)
            return holder.parsed()
        level = [each for each in inner if isinstance(each[0], dict | list)]
    return _transcript_in(holder)


def _transcript_in(holder: Node) -> Node | None:
    """Return the messages in the first field whose text is a dialogue of a user and an agent; None if there is none."""
    for key, text in holder.value.items() if isinstance(holder.value, dict) else ():
        messages = messages_in(text) if isinstance(text, str) else []
        if {"user", "agent"} <= {SPEAKERS.get(role_of(message["role"])) for message in messages}:
            return holder.at(key)._replace(value=messages)
    return None


def _are_exchanges(value: object, path: tuple[str | int, ...]) -> bool:
    """Return whether a list holds the questions and answers of one run. Under other keys, each pair is a run."""
    return path[-1] in _EXCHANGES and isinstance(value, list) and any(map(is_exchange, objects_in(value[:_MOST_INSPECTED])))


def _within(value: object) -> Iterable[tuple[str | int, Any]]:
    """Return the values of an object, or the lists in a list, with their keys; objects in a list may be runs by themselves."""
    if isinstance(value, dict):
        return value.items()
    return ((place, each) for place, each in enumerate(value) if isinstance(each, list)) if isinstance(value, list) else ()


def active_branch(records: Sequence[Node], keys: tuple[str, str]) -> list[Node]:
    """Return the records without those of abandoned branches: the run is the last turn and the turns that lead to it.

    ``keys`` are the fields with the id of a record and with the id of its parent. Calls in a message of the branch stay, and
    the results of the branch's calls. All records stay if the way back from the last turn does not end at a beginning.
    """
    id_key, parent_key = keys
    numbers = [str(each.value.get(id_key) or "") if isinstance(each.value, dict) else "" for each in records]
    ids = {number: each for number, each in zip(numbers, records, strict=True) if number}
    last = next((each for each in reversed(records) if is_turn(each.value)), None)
    branch: dict[str, None] = {}
    while last is not None:
        number = str(last.value.get(id_key))
        parent = last.value.get(parent_key) or last.value.get(f"logical{parent_key[0].upper()}{parent_key[1:]}")
        if number in branch or parent_key not in last.value or (parent and str(parent) not in ids) or number not in ids:
            return list(records)
        branch[number] = None
        last = ids[str(parent)] if parent else None
    on_branch = [each for number, each in zip(numbers, records, strict=True) if number in branch]
    pieces = without_program_texts(pieces_of(turns_of(on_branch)))
    if not has_kind(pieces, "user"):
        return list(records)
    calls = {piece.call_id for piece in pieces if piece.kind == "call"}
    messages = {_message_id(each) for each in on_branch} - {""}

    def is_of_branch(record: Node) -> bool:
        pieces = list(pieces_of(turns_of([record])))
        has_calls = _message_id(record) in messages and has_kind(pieces, "call")
        calls.update(piece.call_id for piece in pieces if has_calls and piece.kind == "call")
        return has_calls or any(piece.kind == "result" and piece.call_id in calls for piece in pieces)

    each_numbered = zip(numbers, records, strict=True)
    return [each for number, each in each_numbered if not number or number in branch or is_of_branch(each)]


def _message_id(record: Node) -> str:
    message = record.value.get("message")
    return str(message.get("id") or "") if isinstance(message, dict) else ""


def pieces_of_branch(records: Sequence[Node], keys: tuple[str, str]) -> list[Piece]:
    """Return the pieces in the turns of records, without those of abandoned branches and repeated ones."""
    return list(without_repeats(pieces_of(turns_of(active_branch(records, keys)))))


def without_repeats(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield pieces without the calls that repeat an open one of the same id, and without repeated results."""
    open_calls: defaultdict[str, dict[str, Piece]] = defaultdict(dict)
    answered: dict[str, str] = {}
    for piece in pieces:
        if piece.kind == "call" and piece.call_id:
            calls, words = open_calls[piece.call_id], f"{piece.name}({as_json(parsed(piece.arguments))})"
            newest = next(reversed(calls.values()), None)
            if newest and newest.name == piece.name and (words in calls or not _are_in_one_list(newest, piece)):
                continue
            calls[words] = piece
            answered.pop(piece.call_id, None)
        elif piece.kind == "result" and piece.call_id:
            calls = open_calls[piece.call_id]
            if not calls and answered.get(piece.call_id) == piece.text:
                continue
            answered[piece.call_id] = piece.text
            if calls:
                calls.popitem()
        yield piece


def _are_in_one_list(*calls: Piece) -> bool:
    """Return whether calls are in one message's list of calls or content, where one id has a call for each of its arguments.

    Some servers give all calls of an answer one id, such as the name of the tool. Elsewhere, different arguments do not make
    two calls: programs record a call again while its arguments grow, or once a person has changed them.
    """
    lists = {(call.node.line, call.node.path.rpartition(".")[0]) for call in calls}
    return len(lists) == 1 and all(path.lower().endswith(("calls", "content")) for _, path in lists)
