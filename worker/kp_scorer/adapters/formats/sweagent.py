"""Trajectories of SWE-agent and of mini-swe-agent.

- SWE-agent's ``trajectory`` holds the steps; ``history`` holds the task, and the functions that the model called:
  https://swe-agent.com/latest/usage/trajectories/
- mini-swe-agent's ``messages`` hold everything. Before its second version, the model wrote each command into its text, and the
  user's next message held the output: https://mini-swe-agent.com/latest/usage/output_files/
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.formats import webarena
from kp_scorer.adapters.messages import pieces_of, pieces_of_message
from kp_scorer.adapters.node import Node, objects_in
from kp_scorer.adapters.pieces import Piece, utterance
from kp_scorer.adapters.written import with_written_calls


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is a trajectory of SWE-agent or of mini-swe-agent."""
    version = value.get("trajectory_format")
    is_mini = "messages" in value and isinstance(value.get("info"), dict) and "exit_status" in value["info"]
    is_mini = is_mini or (isinstance(version, str) and version.startswith("mini-swe-agent"))
    steps = objects_in(value.get("trajectory"))
    is_other = (steps and "role" in steps[0]) or webarena.fits(value)
    return is_mini or (isinstance(value.get("trajectory"), list) and not is_other)


def run(_own_id: str, trajectories: Sequence[Node]) -> Run:
    """Make a run of a trajectory."""
    (trajectory,) = trajectories
    steps, messages = trajectory.at("trajectory"), trajectory.at("messages")
    if steps.value is not None:
        framework, pieces = "SWE-agent", _pieces_of_steps(trajectory, steps)
    elif messages.value is not None:
        # Skip the submission, which ``info`` holds as well.
        spoken = (message for message in messages.items() if message.at("role").value != "exit")
        framework, pieces = "mini-swe-agent", with_written_calls(list(pieces_of(spoken)), acts_by_fences=True)
    else:
        raise steps.refusal("expected the list of steps")
    answer = trajectory.at("info", "submission")
    return Run(trajectory, trace_id("sweagent", "", trajectory.value), pieces, framework=framework, answer=answer)


def _pieces_of_steps(trajectory: Node, steps: Node) -> Sequence[Piece]:
    history = trajectory.at("history").items()
    if not history and steps.items():
        # The model's first input holds the task too. Before version 1.1, ``query`` was called ``messages``.
        history = steps.items()[0].first("query", "messages").items()
    # Skip demonstrations, which precede the task.
    tasks = [each for each in history if each.at("role").text() == "user" and not each.at("is_demo").value][:1]
    objective = [piece for message in tasks for piece in pieces_of_message(message)]
    calls = _calls(history)
    return [*objective, *(piece for step in steps.items() for piece in _step(step, calls))]


def _calls(history: Iterable[Node]) -> dict[str, Piece]:
    """Return the model's calls by the commands that SWE-agent made of them, because steps record only the commands."""
    by_command: dict[str, Piece] = {}
    for message in history:
        action = message.at("action").value
        if isinstance(action, str) and message.at("tool_calls").items():
            calls = [piece for piece in pieces_of_message(message) if piece.kind == "call"]
            # Skip several calls: SWE-agent makes no command of them, and asks the model again.
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


FORMAT = Format(fits, run)
