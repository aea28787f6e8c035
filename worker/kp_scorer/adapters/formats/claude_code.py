"""Sessions of Claude Code, as JSON Lines of the Messages API's messages, and of Qwen Code, whose lines have Gemini's contents.

No specification is published. Lines of other types than those of messages are about settings and the program's state.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, run_of_session
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import pieces_of
from kp_scorer.adapters.node import Node, as_json, objects_in
from kp_scorer.adapters.pieces import Piece
from kp_scorer.adapters.turns import active_branch, without_repeats

_SPOKEN: Final = ("user", "assistant", "tool_result")
_OF_THE_PROGRAM: Final = ("isMeta", "isCompactSummary", "isApiErrorMessage")
_BOOKKEEPING: Final = frozenset(
    {"leafUuid", "snapshot", "aiTitle", "lastPrompt", "permissionMode", "operation", "prNumber", "mode"}
)


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a line of a session."""
    names = set(value)
    return ("type" in names and "sessionId" in names and bool(({"uuid"} | _BOOKKEEPING) & names)) or (
        value.get("type") in ("summary", "file-history-snapshot") and bool(_BOOKKEEPING & names)
    )


def records(source: Node) -> list[Node]:
    """Return the lines of a source that are part of a session: those of messages, and others that have ids."""
    return [line for line in source.each() if not isinstance(line.value, dict) or {"sessionId", "uuid"} <= set(line.value)]


def run_id(line: Node) -> str:
    """Return the id of the session, or of the subagent in it, to which a line belongs."""
    session_id = line.at("sessionId").required_text()
    return f"{session_id}:{line.at('agentId').text() or 'sidechain'}" if line.at("isSidechain").value is True else session_id


def identities(line: Node) -> list[str]:
    """Return the texts that identify a message: a session that continues or forks repeats lines, or only their ids."""
    message = line.at("message").value
    if not isinstance(message, dict):
        return []
    fields, content = line.object(), as_json([message.get("role"), message.get("content", message.get("parts"))])
    ids = (fields.get("uuid"), message.get("id"), fields.get("timestamp"))
    return [f"{place} {each} {fields.get('agentId')} {content}" for place, each in enumerate(ids) if each]


def run(own_id: str, lines: Sequence[Node]) -> list[Run]:
    """Make a run of a session, or of each of its parts that is a subagent's."""
    messages = objects_in([line.at("message").value for line in lines])
    kind = "qwen-code" if any("parts" in message for message in messages) else "claude-code"
    if not own_id.endswith(":sidechain"):
        return [run_of_session(kind, own_id, lines, _pieces(lines))]
    # The subagents of earlier versions have no ids. Each begins with a line whose parent is not among these.
    parts: defaultdict[str, list[Node]] = defaultdict(list)
    first_of: dict[str, str] = {}
    for line in lines:
        number, parent = line.at("uuid").text(), line.at("parentUuid").text()
        first_of[number] = first_of.get(parent, number)
        parts[first_of[number]].append(line)
    several = len(parts) > 1
    return [
        run_of_session(kind, f"{own_id.removesuffix('sidechain')}{first}" if several else own_id, part, _pieces(part))
        for first, part in parts.items()
    ]


def _pieces(lines: Sequence[Node]) -> list[Piece]:
    branch = active_branch(lines, ("uuid", "parentUuid"))
    spoken = [line for line in branch if line.at("type").value in _SPOKEN and line.at("subtype").value != "notification"]
    by_people_and_models = [line for line in spoken if not any(line.at(mark).value is True for mark in _OF_THE_PROGRAM)]
    return list(without_repeats(pieces_of(_complete(by_people_and_models))))


def _complete(lines: Iterable[Node]) -> list[Node]:
    """Return the messages in lines, without beginnings of messages that the next line records again, longer."""
    messages: list[Node] = []
    before, earlier = None, ""
    for message in (line.at("message") for line in lines):
        own_id, text = message.object().get("id"), _only_text(message.object())
        if own_id and own_id == before and earlier and text.startswith(earlier):
            messages.pop()
        messages.append(message)
        before, earlier = own_id, text
    return messages


def _only_text(message: dict[str, Any]) -> str:
    blocks = message.get("content")
    block = blocks[0] if isinstance(blocks, list) and len(blocks) == 1 else None
    text = block.get("text", block.get("thinking")) if isinstance(block, dict) else None
    return text if isinstance(text, str) else ""


FORMAT = Format(fits, run, records, run_id, identities=identities, is_of_one_file=True)
