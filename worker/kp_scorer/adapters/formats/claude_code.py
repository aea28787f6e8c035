"""Sessions of Claude Code, as JSON Lines of the Messages API's messages. No specification is published."""

from collections.abc import Sequence
from typing import Any

from kp_scorer.adapters.building import Run, run_of_session
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import pieces_of_message
from kp_scorer.adapters.node import Node


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a line of a session."""
    return ("sessionId" in value and {"type", "uuid"} <= set(value)) or (
        value.get("type") in ("summary", "file-history-snapshot") and bool({"leafUuid", "snapshot"} & set(value))
    )


def records(source: Node) -> list[Node]:
    """Return the lines of sessions in a source. Other lines summarise sessions, or hold files."""
    return [line for line in source.each() if not isinstance(line.value, dict) or "sessionId" in line.value]


def run_id(line: Node) -> str:
    """Return the id of the session, or of the subagent in it, to which a line belongs."""
    session_id = line.at("sessionId").required_text()
    return f"{session_id}:{line.at('agentId').text() or 'sidechain'}" if line.at("isSidechain").value is True else session_id


def run(own_id: str, lines: Sequence[Node]) -> Run:
    """Make a run of a session, or of the part of it that is a subagent's."""
    # ``isMeta`` marks remarks of the program itself, such as those about commands.
    spoken = [line for line in lines if line.at("type").value in ("user", "assistant") and line.at("isMeta").value is not True]
    pieces = [piece for line in spoken for piece in pieces_of_message(line.at("message"))]
    return run_of_session("claude-code", own_id, lines, pieces)


FORMAT = Format(fits, run, records, run_id, is_of_one_file=True)
