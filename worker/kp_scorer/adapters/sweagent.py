"""SWE-agent's trajectories: the ``.traj`` file that it writes for each instance.

A source is one such file. Its steps are those of ``trajectory``; what the agent was asked, and which tools it called where the
model calls functions, stand in ``history``.

Specification: https://swe-agent.com/latest/usage/trajectories/, and the types in
https://github.com/SWE-agent/SWE-agent/blob/main/sweagent/types.py.
"""

from collections.abc import Iterable, Iterator, Sequence

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.messages import Piece, pieces_of_message, utterance
from kp_scorer.adapters.node import Node


def records(source: Node) -> list[Node]:
    """The trajectories in a source: itself, or the items of a list."""
    return source.items() if isinstance(source.value, list) else [source]


def run(_own: str, trajectories: Sequence[Node]) -> Run:
    """The run that a trajectory is."""
    (trajectory,) = trajectories
    steps = trajectory.at("trajectory")
    if steps.value is None:
        raise steps.refusal("expected the list of steps")
    history = trajectory.at("history").items()
    if not history and steps.items():
        # The first input of the model; before version 1.1 it was called otherwise.
        history = steps.items()[0].first("query", "messages").items()
    calls = _calls(history)
    pieces = [*_objective(history), *(piece for step in steps.items() for piece in _step(step, calls))]
    info = trajectory.at("info")
    answer = None if info.value is None else info.at("submission")
    return Run(trajectory, trace_id("sweagent", "", trajectory.value), pieces, framework="SWE-agent", answer=answer)


def _objective(history: Iterable[Node]) -> list[Piece]:
    """The first message of the user; demonstrations come before it."""
    asked = (each for each in history if each.at("role").text() == "user" and not each.at("is_demo").value)
    return [piece for message in list(asked)[:1] for piece in pieces_of_message(message)]


def _calls(history: Iterable[Node]) -> dict[str, Piece]:
    """The calls of functions that the model wrote, by the command that each was rendered to, which steps have alone."""
    by_command: dict[str, Piece] = {}
    for message in history:
        action = message.at("action").value
        if isinstance(action, str) and message.at("tool_calls").items():
            calls = [piece for piece in pieces_of_message(message) if piece.kind == "call"]
            # Several are rendered to no command: SWE-agent asks again.
            if len(calls) == 1:
                by_command[action] = calls[0]
    return by_command


def _step(step: Node, calls: dict[str, Piece]) -> Iterator[Piece]:
    yield from utterance(step, "agent", step.first("thought", "response").text())
    action, observation = step.at("action").text(), step.at("observation").text()
    if words := action.split():
        seconds = step.at("execution_time").number()
        call = calls.get(action) or Piece(step, "call", name=words[0], arguments={"command": action})
        yield call._replace(node=step, text=action, call_id="", latency_ms=None if seconds is None else seconds * 1_000)
    if words or observation:
        yield Piece(step, "result", observation)
