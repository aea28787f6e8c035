"""SWE-agent's trajectories, the ``.traj`` file that it writes for each instance, and those of mini-swe-agent.

A source is one such file. Its steps are those of ``trajectory``; what the agent was asked, and which tools it called where the
model calls functions, stand in ``history``. Those of mini-swe-agent are ``messages``; before its second version the model wrote
each command among its text, and the user returned what that put out.

Specification: https://swe-agent.com/latest/usage/trajectories/, and the types in
https://github.com/SWE-agent/SWE-agent/blob/main/sweagent/types.py; https://mini-swe-agent.com/latest/usage/output_files/.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.messages import Piece, Transcript, is_message, pieces_in, pieces_of_message, utterance
from kp_scorer.adapters.node import Node

_COMMAND: Final = re.compile(r"```(?:bash|mswea_bash_command)\s*\n(.*?)\n```", re.DOTALL)


def fits(value: dict[str, Any]) -> bool:
    """Whether an object is a trajectory of either."""
    is_mini = "messages" in value and isinstance(value.get("info"), dict) and "exit_status" in value["info"]
    return (
        is_mini or str(value.get("trajectory_format")).startswith("mini-swe-agent") or isinstance(value.get("trajectory"), list)
    )


def records(source: Node) -> list[Node]:
    """The trajectories in a source: itself, or the items of a list."""
    return source.items() if isinstance(source.value, list) else [source]


def run(_own: str, trajectories: Sequence[Node]) -> Run:
    """The run that a trajectory is."""
    (trajectory,) = trajectories
    steps, messages = trajectory.at("trajectory"), trajectory.at("messages")
    if steps.value is not None:
        framework, pieces = "SWE-agent", _pieces(trajectory, steps)
    elif messages.value is not None:
        framework, pieces = "mini-swe-agent", list(_pieces_of_messages(messages.items()))
    else:
        raise steps.refusal("expected the list of steps")
    info = trajectory.at("info")
    answer = None if info.value is None else info.at("submission")
    return Run(trajectory, trace_id("sweagent", "", trajectory.value), pieces, framework=framework, answer=answer)


def _pieces(trajectory: Node, steps: Node) -> list[Piece]:
    history = trajectory.at("history").items()
    if not history and steps.items():
        # The first input of the model; before version 1.1 it was called otherwise.
        history = steps.items()[0].first("query", "messages").items()
    calls = _calls(history)
    return [*_objective(history), *(piece for step in steps.items() for piece in _step(step, calls))]


def _pieces_of_messages(messages: Iterable[Node]) -> Iterator[Piece]:
    has_called = False
    for message in messages:
        if message.at("role").value == "exit":
            # The submission, which is in ``info`` as well.
            continue
        is_item = not is_message(message.value)
        pieces = (
            (pieces_in(message, "agent", Transcript(), is_model=True) or []) if is_item else list(pieces_of_message(message))
        )
        for piece in pieces:
            commands = list(_COMMAND.finditer(piece.text)) if piece.kind == "agent" else []
            if len(pieces) == len(commands) == 1:
                yield from utterance(message, "agent", piece.text[: commands[0].start()])
                yield Piece(message, "call", name="bash", arguments={"command": commands[0][1]})
            else:
                yield piece._replace(kind="result") if has_called and piece.kind == "user" else piece
            has_called = bool(commands)


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
