"""Trajectories of Harbor, in ATIF.

Specification: https://www.harborframework.com/docs/agents/trajectory-format
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.messages import pieces_of_message
from kp_scorer.adapters.node import Node
from kp_scorer.adapters.pieces import Piece, has_kind
from kp_scorer.adapters.times import first_timestamp

_ROLES: Final = {"system": "system", "user": "user", "agent": "assistant"}
"""The role of a message by the ``source`` of its step."""


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a trajectory."""
    version = value.get("schema_version")
    return isinstance(version, str) and version.startswith("ATIF")


def run(_own_id: str, trajectories: Sequence[Node]) -> Run:
    """Make a run of a trajectory."""
    (trajectory,) = trajectories
    steps = trajectory.at("steps").items()
    pieces = [piece for step in steps if step.at("is_copied_context").value is not True for piece in _pieces_of(step)]
    if not has_kind(pieces, "user"):
        # A trajectory that continues another first repeats the steps of that one, with the question.
        asked = (piece for step in steps for piece in _pieces_of(step) if piece.kind == "user")
        pieces = [*list(asked)[:1], *pieces]
    own_id = trace_id("atif", trajectory.first("trajectory_id", "session_id").text(), trajectory.value)
    return Run(trajectory, own_id, pieces, first_timestamp(steps), framework=trajectory.at("agent", "name").text())


def _pieces_of(step: Node) -> Iterator[Piece]:
    if (speaker := step.at("source").required_text()) not in _ROLES:
        raise step.at("source").refusal("expected system, user or agent")
    yield from pieces_of_message(step._replace(value=step.object() | {"role": _ROLES[speaker]}))
    for result in step.at("observation", "results").items():
        if "content" not in result.object():
            # Skip a result that only refers to the trajectories of subagents.
            continue
        yield from pieces_of_message(result._replace(value=result.object() | {"role": "tool"}))


FORMAT = Format(fits, run)
