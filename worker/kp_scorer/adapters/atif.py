"""Harbor's trajectories in ATIF, the Agent Trajectory Interchange Format: one JSON document a run.

Specification: https://www.harborframework.com/docs/agents/trajectory-format, and the models in
https://github.com/laude-institute/harbor/tree/main/src/harbor/models/trajectories.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.messages import Piece, returned_in, text_in, utterance
from kp_scorer.adapters.node import Node


def fits(value: dict[str, Any]) -> bool:
    """Whether an object is a trajectory."""
    return str(value.get("schema_version")).startswith("ATIF")


def run(own: str, trajectories: Sequence[Node]) -> Run:
    """The run that a trajectory is."""
    (trajectory,) = trajectories
    steps = trajectory.at("steps").items()
    pieces = [piece for step in steps for piece in _step(step)]
    own = trajectory.first("trajectory_id", "session_id").text()
    times = (step.at("timestamp").text() for step in steps)
    framework = trajectory.at("agent", "name").text() if trajectory.at("agent").value is not None else None
    made_at = next(filter(None, times), None)
    return Run(trajectory, trace_id("atif", own, trajectory.value), pieces, created_at=made_at, framework=framework)


def _step(step: Node) -> Iterator[Piece]:
    speaker = step.at("source").required_text()
    if speaker not in ("system", "user", "agent"):
        raise step.at("source").refusal("expected system, user or agent")
    if step.at("is_copied_context").value is True:
        # What a trajectory that was continued begins with again.
        return
    if speaker == "user":
        yield from utterance(step, "user", text_in(step.at("message").value))
    elif speaker == "agent":
        for key in ("reasoning_content", "message"):
            yield from utterance(step, "agent", text_in(step.at(key).value))
        for call in step.at("tool_calls").items():
            name, call_id = call.at("function_name").required_text(), call.at("tool_call_id").text()
            yield Piece(call, "call", name=name, arguments=call.at("arguments").value, call_id=call_id)
    if step.at("observation").value is not None:
        for result in step.at("observation", "results").items():
            text, is_error = returned_in(result.at("content").value)
            yield Piece(result, "result", text, call_id=result.at("source_call_id").text(), is_error=is_error)
