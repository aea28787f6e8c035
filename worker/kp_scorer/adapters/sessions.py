"""Session files of Claude Code and of Codex: JSON Lines, of which each holds a message, an item or an event of a session.

Specifications: none is published. Claude Code writes the Messages API's messages beside what it knows of them; Codex writes the
Responses API's items, as https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs has them.
"""

from collections.abc import Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.messages import Piece, pieces_of, pieces_of_message, utterance
from kp_scorer.adapters.node import Node

_OF_CODEX: Final = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")


def is_of_claude_code(value: dict[str, Any]) -> bool:
    """Whether an object is a line of a session of Claude Code."""
    return ("sessionId" in value and {"type", "uuid"} <= set(value)) or (
        value.get("type") in ("summary", "file-history-snapshot") and bool({"leafUuid", "snapshot"} & set(value))
    )


def is_of_codex(value: dict[str, Any]) -> bool:
    """Whether an object is a line of a session of Codex."""
    return value.get("type") in _OF_CODEX and isinstance(value.get("payload"), dict)


def lines_of_claude_code(source: Node) -> list[Node]:
    """The lines in a source that are of a session; others sum sessions up, or hold files."""
    lines = source.items() if isinstance(source.value, list) else [source]
    return [line for line in lines if not isinstance(line.value, dict) or "sessionId" in line.value]


def id_of_claude_code(line: Node) -> str:
    """The id of the session, or of the subagent in it, to which a line belongs."""
    own = line.at("sessionId").required_text()
    return f"{own}:{line.at('agentId').text() or 'sidechain'}" if line.at("isSidechain").value is True else own


def id_of_codex(line: Node) -> str:
    """The id of the session that begins with this line; empty for one that goes on with it."""
    return line.at("payload", "id").text() if line.at("type").value == "session_meta" else ""


def run_of_claude_code(own: str, lines: Sequence[Node]) -> Run:
    """The run that a session, or a subagent's part of one, is."""
    pieces: list[Piece] = []
    for line in lines:
        # Remarks of the program itself are marked, as those about commands are.
        if line.at("type").value in ("user", "assistant") and line.at("isMeta").value is not True:
            pieces += pieces_of_message(line.at("message"))
    return _run(own, lines, pieces, "claude-code")


def run_of_codex(own: str, lines: Sequence[Node]) -> Run:
    """The run that a session is; what the user typed is in events, beside messages of the user that the program made."""
    pieces: list[Piece] = []
    has_typed = any(_is_typed(line) for line in lines)
    for line in lines:
        payload = line.at("payload")
        if _is_typed(line):
            pieces += utterance(payload, "user", payload.at("message").text())
        elif line.at("type").value == "response_item" and not (has_typed and payload.at("role").value == "user"):
            pieces += pieces_of([payload])
    return _run(own, lines, pieces, "codex")


def _is_typed(line: Node) -> bool:
    return [line.at("type").value, line.at("payload", "type").value] == ["event_msg", "user_message"]


def _run(own: str, lines: Sequence[Node], pieces: Sequence[Piece], kind: str) -> Run:
    times = (line.at("timestamp").text() for line in lines)
    content = [line.value for line in lines]
    return Run(lines[0], trace_id(kind, own, content), pieces, created_at=next(filter(None, times), None), framework=kind)
