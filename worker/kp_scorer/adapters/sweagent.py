"""SWE-agent's trajectories: the ``.traj`` file that it writes for each instance.

A source is one such file. Its steps are those of ``trajectory``; what the agent was asked, and which tools it called where the
model calls functions, stand in ``history``.

Specification: https://swe-agent.com/latest/usage/trajectories/, and the types in
https://github.com/SWE-agent/SWE-agent/blob/main/sweagent/types.py.
"""

from collections.abc import Iterable, Iterator

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.chat import pieces_of_message
from kp_scorer.adapters.pieces import Asked, Called, Piece, Returned, Said, content_text, spoken
from kp_scorer.adapters.source import Node
from kp_scorer.errors import NotConverted


def runs(sources: Iterable[Node]) -> Iterator[Run | NotConverted]:
    """One run for each trajectory, in the order of the input."""
    for source in sources:
        for trajectory in source.items() if isinstance(source.value, list) else [source]:
            try:
                yield _run(trajectory)
            except NotConverted as error:
                yield error


def _run(trajectory: Node) -> Run:
    steps = trajectory.at("trajectory")
    if steps.value is None:
        raise steps.refusal("expected the list of steps")
    history = trajectory.at("history").items()
    if not history and steps.items():
        # The first input of the model; before version 1.1 it was called otherwise.
        history = steps.items()[0].first("query", "messages").items()
    calls = _calls(history)
    pieces = [*_asked(history), *(piece for step in steps.items() for piece in _step(step, calls))]
    info = trajectory.at("info")
    answer = None if info.value is None else info.at("submission")
    return Run(trajectory, trace_id("sweagent", None, trajectory.value), pieces, framework="SWE-agent", answer=answer)


def _asked(history: Iterable[Node]) -> Iterator[Piece]:
    """The first message of the user; demonstrations come before it."""
    for message in history:
        if message.at("role").text() == "user" and not message.at("is_demo").value:
            yield from spoken(Asked, message, content_text(message.at("content")))
            return


def _calls(history: Iterable[Node]) -> dict[str, Called]:
    """The calls of functions that the model wrote, by the command that each was rendered to, which steps have alone."""
    found: dict[str, Called] = {}
    for message in history:
        action = message.at("action").value
        if isinstance(action, str) and message.at("tool_calls").items():
            calls = [piece for piece in pieces_of_message(message) if isinstance(piece, Called)]
            # Several are rendered to no command: SWE-agent asks again.
            if len(calls) == 1:
                found[action] = calls[0]
    return found


def _step(step: Node, calls: dict[str, Called]) -> Iterator[Piece]:
    thought = step.first("thought", "response")
    yield from spoken(Said, step, thought.text())
    action = step.at("action").text()
    if words := action.split():
        seconds = step.at("execution_time").number()
        latency_ms = None if seconds is None else seconds * 1_000
        call = calls.get(action)
        yield Called(
            step,
            call.name if call else words[0],
            call.arguments if call else {"command": action},
            latency_ms=latency_ms,
            text=action,
        )
    if words or step.at("observation").text():
        yield Returned(step, step.at("observation").text())
