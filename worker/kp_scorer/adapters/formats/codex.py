"""Sessions of Codex, as JSON Lines of the Responses API's items.

Specification: https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs
"""

from collections.abc import Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, run_of_session
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import pieces_of
from kp_scorer.adapters.node import Node, as_json
from kp_scorer.adapters.pieces import Piece, utterance

_MOST_FORKS: Final = 8
_PARENTS: Final = ("forked_from_id", "parent_thread_id")
_TYPES: Final = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a line of a session."""
    return value.get("type") in _TYPES and isinstance(value.get("payload"), dict)


def run_id(line: Node) -> str:
    """Return the id of the session that begins with a line; empty for a line that continues one."""
    return line.at("payload", "id").required_text() if line.at("type").value == "session_meta" else ""


def continues(lines: Sequence[Node], line: Node) -> bool:
    """Return whether a line begins the parent of a session: the file of a forked session repeats its parent's lines."""
    parents = {each.at("payload", key).text() for each in lines[:_MOST_FORKS] for key in _PARENTS}
    return line.at("payload", "id").text() in parents - {""}


def identities(line: Node) -> list[str]:
    """Return the line itself: a session that was resumed or forked repeats the lines of the earlier session."""
    return [as_json(line.value)] if line.at("type").value in ("response_item", "event_msg") else []


def run(own_id: str, lines: Sequence[Node]) -> Run:
    """Make a run of a session. The user's texts come from events, as the program adds messages of the user to the items."""
    pieces: list[Piece] = []
    has_typed = any(_is_typed(line) for line in lines)
    for line in lines:
        payload = line.at("payload")
        if _is_typed(line):
            pieces += utterance(payload, "user", payload.at("message").text())
        elif line.at("type").value == "response_item" and not (has_typed and payload.at("role").value == "user"):
            pieces += pieces_of([payload])
    return run_of_session("codex", own_id, lines, pieces)


def _is_typed(line: Node) -> bool:
    return [line.at("type").value, line.at("payload").at("type").value] == ["event_msg", "user_message"]


FORMAT = Format(fits, run, run_id=run_id, continues=continues, identities=identities, is_of_one_file=True)
