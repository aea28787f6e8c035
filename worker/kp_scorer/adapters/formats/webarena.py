"""Trajectories of agents in a browser, in the form of WebArena's: the pages that the agent saw, and its actions.

A step has both, as AgentOccam writes it, or states and actions take turns. An action is a text such as ``click [12]``, alone
or in the first fence of ``raw_prediction``, after the thought.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.node import Node, objects_in
from kp_scorer.adapters.pieces import Piece, utterance
from kp_scorer.adapters.times import first_timestamp

_ACTION: Final = re.compile(r"\s*+(?:click|type|hover|press|scroll|goto|tab_focus|stop) \[")
_STOP: Final = re.compile(r"\s*+stop \[(.*)\]\s*+", re.DOTALL)


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a trajectory: one of its first steps has an action in a browser."""
    steps = objects_in(value.get("trajectory", value.get("steps")))[:50]
    return any(_ACTION.match(_thought_and_action(Node(1, "", step))[1]) for step in steps)


def run(_own_id: str, trajectories: Sequence[Node]) -> Run:
    """Make a run of a trajectory; the action that stops it has the answer. Raises NotConverted if there is no task."""
    (trajectory,) = trajectories
    steps = trajectory.first("trajectory", "steps").items()
    asked = [trajectory.first("intent", "objective"), *(step.at("objective") for step in steps[:1])]
    asked.append(trajectory.first("task", "goal", "instruction"))
    objective = next((each for each in asked if isinstance(each.value, str) and each.value.strip()), None)
    if objective is None:
        raise trajectory.refusal("expected the task of the agent as intent, objective, task, goal or instruction")
    pieces = [*utterance(objective, "user", objective.text()), *(piece for step in steps for piece in _pieces_of(step))]
    stop = _STOP.fullmatch(pieces[-1].text)
    answer = trajectory._replace(value=stop[1] if stop else None)
    return Run(trajectory, trace_id("webarena", "", trajectory.value), pieces, first_timestamp([trajectory]), answer=answer)


def _pieces_of(step: Node) -> Iterator[Piece]:
    page = step.at("observation")
    page = page.first("text", "accessibility_tree") if isinstance(page.value, dict) else page
    if page.text():
        yield Piece(step, "result", page.text())
    thought, action = _thought_and_action(step)
    yield from utterance(step, "agent", thought)
    if action:
        yield Piece(step, "call", name=action.split()[0], text=action, arguments={"command": action})


def _thought_and_action(step: Node) -> tuple[str, str]:
    predicted, action = step.at("raw_prediction").value, step.at("action").value
    thought = step.first("thought", "reason", "reasoning").value
    if isinstance(predicted, str) and not isinstance(action, str):
        before, fence, behind = predicted.partition("```")
        thought, action = (before, behind.partition("```")[0]) if fence else (thought, predicted)
    return thought.strip() if isinstance(thought, str) else "", action.strip() if isinstance(action, str) else ""


FORMAT = Format(fits, run)
