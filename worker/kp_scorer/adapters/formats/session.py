"""Sessions of any agent, as JSON Lines with one message, event or part of a message on each line.

All lines of a file are one run, unless they name the sessions to which they belong. Lines that are no turn, such as those about
settings, are skipped; the first such line may have the id and the time of the session.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.node import Node, as_json, keys_by_plain_name
from kp_scorer.adapters.pieces import Piece, has_kind
from kp_scorer.adapters.times import first_timestamp
from kp_scorer.adapters.turns import is_turn, pieces_of_branch

_SESSION_IDS: Final = ("sessionid", "conversationid", "threadid", "chatid")


def fits(value: object) -> bool:
    """Return whether a source is a single turn."""
    return isinstance(value, dict) and is_turn(value)


def run_id(line: Node) -> str:
    """Return the id of the session that a line names; empty for a line that names none."""
    own_id = line.at_plain(*_SESSION_IDS).value
    return own_id if isinstance(own_id, str) else ""


def identities(line: Node) -> list[str]:
    """Return the line itself, if it has an id and a time: a session that goes on in another file may repeat it there."""
    has_id = isinstance(line.value, dict) and {"id", "uuid"} & set(keys_by_plain_name(line.value))
    return [as_json(line.value)] if has_id and first_timestamp([line]) else []


def continues(lines: Sequence[Node], line: Node) -> bool:
    """Return whether a line belongs to the session before it, although only one of them names it."""
    before = run_id(lines[-1]) if isinstance(lines[-1].value, dict) else ""
    return before in ("", run_id(line))


def run(own_id: str, lines: Sequence[Node]) -> Run:
    """Make a run of the lines of a session."""
    own_id = own_id or next(filter(None, (run_id(line) for line in lines if isinstance(line.value, dict))), "")
    headers = (line for line in lines if isinstance(line.value, dict) and not is_turn(line.value))
    if not own_id and (header := next(headers, None)):
        places = (header, header.at("data")) if isinstance(header.value.get("data"), dict) else (header,)
        ids = [place.at_plain(*_SESSION_IDS).value for place in places] + [header.at("id").value]
        own_id = next((each for each in ids if isinstance(each, str)), "")
    pieces = list(_of_calls(pieces_of_branch(lines, ("id", "parentId"))))
    if pieces and not has_kind(pieces, "user"):
        raise lines[0].refusal(
            "expected a message of the user, which is the objective: output of an agent may lack it; convert the session that "
            'the agent keeps, or put {"role": "user", "content": …} on a line before'
        )
    return Run(lines[0], trace_id("session", own_id, [line.value for line in lines]), pieces, first_timestamp(lines))


def _of_calls(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield pieces without those that only look like results, such as the permission for a call that comes later."""
    called: set[str] = set()
    for piece in pieces:
        if piece.kind == "call":
            called.add(piece.call_id)
        if piece.kind != "result" or piece.call_id in called or "" in called or not called:
            yield piece


FORMAT = Format(fits, run, run_id=run_id, continues=continues, identities=identities, is_general=True, is_of_one_file=True)
