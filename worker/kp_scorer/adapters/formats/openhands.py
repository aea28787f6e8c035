"""Events of OpenHands: a list of them, or the ``history`` in the output of its evaluations, with the ``instruction``.

An event has an ``action`` with its ``args``, or an ``observation`` with its ``content``:
https://github.com/OpenHands/OpenHands/tree/main/openhands/events
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.format import Format
from kp_scorer.adapters.node import Node, objects_in
from kp_scorer.adapters.pieces import Piece, has_kind, utterance
from kp_scorer.adapters.times import first_timestamp

_OF_THE_PROGRAM: Final = (
    "system recall change_agent_state agent_state_changed null condensation server_ready".split()  # noqa: SIM905
)
_NO_ARGUMENTS: Final = frozenset(
    "thought blocking hidden confirmation_state is_input is_static cwd wait_for_response security_risk".split()  # noqa: SIM905
)


def fits(value: dict[str, Any]) -> bool:
    """Return whether an object is an event, or the output of an evaluation."""
    return any(map(_is_event, objects_in(value.get("history")))) or _is_event(value)


def _is_event(value: dict[str, Any]) -> bool:
    is_event = isinstance(value.get("action"), str) and isinstance(value.get("args"), dict)
    return "source" in value and (is_event or (isinstance(value.get("observation"), str) and "content" in value))


def records(source: Node) -> list[Node]:
    """Return the runs in a source; a list of events is one run."""
    return [source] if isinstance(source.value, list) and any(map(_is_event, objects_in(source.value))) else source.each()


def run(_own_id: str, runs: Sequence[Node]) -> Run:
    """Make a run of a list of events, or of the output of an evaluation."""
    (source,) = runs
    events = source.items() if isinstance(source.value, list) else source.at("history").each()
    # Older outputs have pairs of an action and its observation.
    flat = [each for event in events for each in event.each()]
    pieces = [piece for event in flat for piece in _pieces_of(event)]
    if isinstance(source.value, dict) and not has_kind(pieces, "user"):
        instruction = source.at("instruction")
        pieces = [*utterance(instruction, "user", instruction.text()), *pieces]
    return Run(source, trace_id("openhands", "", source.value), pieces, first_timestamp(flat), framework="OpenHands")


def _pieces_of(event: Node) -> Iterator[Piece]:
    action, observation = event.at("action").value, event.at("observation").value
    call_id, name = (event.at("tool_call_metadata", key).text() for key in ("tool_call_id", "function_name"))
    if observation is not None and observation not in _OF_THE_PROGRAM:
        code = event.at("extras", "metadata", "exit_code").value if isinstance(event.at("extras").value, dict) else None
        is_error = observation == "error" or (isinstance(code, int) and code > 0)
        yield Piece(event, "result", event.at("content").text(), name, call_id=call_id, is_error=is_error)
    elif action == "message":
        is_of_user = event.at("source").value == "user"
        yield from utterance(event, "user" if is_of_user else "agent", event.at("args", "content").text())
    elif isinstance(action, str) and action not in _OF_THE_PROGRAM and event.at("source").value == "agent":
        arguments = event.at("args").object()
        thought = arguments.get("thought")
        yield from utterance(event, "agent", thought if isinstance(thought, str) and action != "think" else "")
        arguments = {
            key: value for key, value in arguments.items() if key not in _NO_ARGUMENTS or (action == "think" and value)
        }
        yield Piece(event, "call", name=name or action, arguments=arguments, call_id=call_id)


FORMAT = Format(fits, run, records)
