"""Sessions of Claude Code and of Codex, and trajectories of SWE-agent, mini-swe-agent and Harbor: what agents write themselves.

- A session is JSON Lines. Claude Code writes the Messages API's messages, by no published specification; Codex the Responses
  API's items: https://github.com/openai/codex/blob/main/codex-rs/protocol/src/protocol.rs
- SWE-agent's ``trajectory`` has steps, ``history`` what it was asked and which functions the model called:
  https://swe-agent.com/latest/usage/trajectories/
- mini-swe-agent has ``messages``; before its second version the model wrote each command among its text, and the user returned
  what that put out: https://mini-swe-agent.com/latest/usage/output_files/
- Harbor has ATIF: https://www.harborframework.com/docs/agents/trajectory-format
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kp_scorer.adapters.building import Run, trace_id
from kp_scorer.adapters.messages import Piece, Transcript, pieces_in, pieces_of, pieces_of_message, utterance
from kp_scorer.adapters.node import Node

_FENCE: Final = re.compile(r"```(?:bash|mswea_bash_command)\s++")  # Before a command, which ends at the next fence.
_ROLES: Final = {"system": "system", "user": "user", "agent": "assistant"}  # Of messages, by who speaks in a step of ATIF.
_OF_CODEX: Final = ("session_meta", "response_item", "event_msg", "turn_context", "compacted")


def is_claude(value: dict[str, Any]) -> bool:
    """Whether an object is a line of a session of Claude Code."""
    return ("sessionId" in value and {"type", "uuid"} <= set(value)) or (
        value.get("type") in ("summary", "file-history-snapshot") and bool({"leafUuid", "snapshot"} & set(value))
    )


def is_codex(value: dict[str, Any]) -> bool:
    """Whether an object is a line of a session of Codex."""
    return value.get("type") in _OF_CODEX and isinstance(value.get("payload"), dict)


def _begins(value: object, text: str) -> bool:
    return isinstance(value, str) and value.startswith(text)


def lines_of_claude(source: Node) -> list[Node]:
    """The lines in a source that are of a session; others sum sessions up, or hold files."""
    return [line for line in source.each() if not isinstance(line.value, dict) or "sessionId" in line.value]


def id_of_claude(line: Node) -> str:
    """The id of the session, or of the subagent in it, to which a line belongs."""
    own = line.at("sessionId").required_text()
    return f"{own}:{line.at('agentId').text() or 'sidechain'}" if line.at("isSidechain").value is True else own


def id_of_codex(line: Node) -> str:
    """The id of the session that begins with this line; empty for one that goes on with it."""
    return line.at("payload", "id").text() if line.at("type").value == "session_meta" else ""


def run_of_claude(own: str, lines: Sequence[Node]) -> Run:
    """The run that a session, or a subagent's part of one, is."""
    # Remarks of the program itself are marked, as those about commands are.
    spoken = [line for line in lines if line.at("type").value in ("user", "assistant") and line.at("isMeta").value is not True]
    pieces = [piece for line in spoken for piece in pieces_of_message(line.at("message"))]
    return _run(own, lines, pieces, "claude-code")


def run_of_codex(own: str, lines: Sequence[Node]) -> Run:
    """The run that a session is; what the user typed is in events, beside messages of the user that the program made."""
    pieces: list[Piece] = []
    has_typed = any(_is_typed(line) for line in lines)
    for line in lines:
        payload = line.at("payload")
        if _is_typed(line):
            pieces += utterance(payload, "user", payload.at("message").text())
        elif line.at("type").value == "response_item" and not (has_typed and payload.at("role").value == "user"):
            pieces += pieces_of([payload])
    return _run(own, lines, pieces, "codex")


def _is_typed(line: Node) -> bool:
    return [line.at("type").value, line.at("payload").at("type").value] == ["event_msg", "user_message"]


def _run(own: str, lines: Sequence[Node], pieces: Sequence[Piece], kind: str) -> Run:
    own_id = trace_id(kind, own, [line.value for line in lines])
    return Run(lines[0], own_id, pieces, created_at=_time(lines), framework=kind)


def _time(records: Sequence[Node]) -> str | None:
    return next((time for record in records if (time := record.at("timestamp").text())), None)


def is_atif(value: dict[str, Any]) -> bool:
    """Whether an object is a trajectory."""
    return _begins(value.get("schema_version"), "ATIF")


def run_of_atif(_own: str, trajectories: Sequence[Node]) -> Run:
    """The run that a trajectory is."""
    (trajectory,) = trajectories
    steps = trajectory.at("steps").items()
    pieces = [piece for step in steps for piece in _step_of_atif(step)]
    own_id = trace_id("atif", trajectory.first("trajectory_id", "session_id").text(), trajectory.value)
    return Run(trajectory, own_id, pieces, created_at=_time(steps), framework=trajectory.at("agent", "name").text())


def _step_of_atif(step: Node) -> Iterator[Piece]:
    if (speaker := step.at("source").required_text()) not in _ROLES:
        raise step.at("source").refusal("expected system, user or agent")
    if step.at("is_copied_context").value is True:
        # What a trajectory that was continued begins with again.
        return
    yield from pieces_of_message(step._replace(value=step.object() | {"role": _ROLES[speaker]}))
    for result in step.at("observation", "results").items():
        yield from pieces_of_message(result._replace(value=result.object() | {"role": "tool"}))


def is_sweagent(value: dict[str, Any]) -> bool:
    """Whether an object is a trajectory of SWE-agent or of mini-swe-agent."""
    is_mini = "messages" in value and isinstance(value.get("info"), dict) and "exit_status" in value["info"]
    is_mini = is_mini or _begins(value.get("trajectory_format"), "mini-swe-agent")
    return is_mini or isinstance(value.get("trajectory"), list)


def run_of_sweagent(_own: str, trajectories: Sequence[Node]) -> Run:
    """The run that a trajectory is."""
    (trajectory,) = trajectories
    steps, messages = trajectory.at("trajectory"), trajectory.at("messages")
    if steps.value is not None:
        framework, pieces = "SWE-agent", _pieces(trajectory, steps)
    elif messages.value is not None:
        framework, pieces = "mini-swe-agent", list(_pieces_of_messages(messages.items()))
    else:
        raise steps.refusal("expected the list of steps")
    answer = trajectory.at("info", "submission")
    return Run(trajectory, trace_id("sweagent", "", trajectory.value), pieces, framework=framework, answer=answer)


def _pieces(trajectory: Node, steps: Node) -> list[Piece]:
    history = trajectory.at("history").items()
    if not history and steps.items():
        # The first input of the model; before version 1.1 it was called otherwise.
        history = steps.items()[0].first("query", "messages").items()
    # Demonstrations come before it.
    asked = [each for each in history if each.at("role").text() == "user" and not each.at("is_demo").value][:1]
    objective = [piece for message in asked for piece in pieces_of_message(message)]
    calls = _calls(history)
    return [*objective, *(piece for step in steps.items() for piece in _step(step, calls))]


def _pieces_of_messages(messages: Iterable[Node]) -> Iterator[Piece]:
    has_called = False
    for message in messages:
        if message.at("role").value == "exit":
            # The submission, which is in ``info`` as well.
            continue
        pieces = pieces_in(message, "agent", Transcript(), is_model=True) or []
        for piece in pieces:
            commands = list(_commands(piece.text)) if piece.kind == "agent" else []
            if len(pieces) == len(commands) == 1:
                start, command = commands[0]
                yield from utterance(message, "agent", piece.text[:start])
                yield Piece(message, "call", name="bash", arguments={"command": command})
            else:
                yield piece._replace(kind="result") if has_called and piece.kind == "user" else piece
            has_called = bool(commands)


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """The commands among a text, each with where its fence begins."""
    place = 0
    while fence := _FENCE.search(text, place):
        place = fence.end()
        # The first line may be indented.
        if start := text.rfind("\n", fence.start(), place) + 1:
            if (end := text.find("\n```", start)) < 0:
                return
            yield fence.start(), text[start:end]
            place = end + len("\n```")


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
