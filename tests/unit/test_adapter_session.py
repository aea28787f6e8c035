"""Sessions with one message, event or part on each line become traces, whichever agent wrote them."""

from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in, steps_of
from tests.unit.test_adapter_openai import assistant, call, result, user
from tests.unit.test_message_shapes import ANSWER, ARGUMENTS, ASKED, FUNCTION, RETURNED, STEPS, THOUGHT, text

Json = dict[str, Any]


def wrapped(role: str, *blocks: Json, **fields: object) -> Json:
    """Return a line that holds its message in an envelope."""
    return {"type": "message", "id": blocks[0].get("text", "x"), "message": {"role": role, "content": list(blocks), **fields}}


def event(kind: str, **data: object) -> Json:
    return {"type": kind, "data": data, "id": kind, "timestamp": "2026-03-01T08:00:00Z"}


def loop(kind: str, **fields: object) -> Json:
    return {"type": "context.append_loop_event", "event": {"type": kind, **fields}}


def payload(kind: str, **fields: object) -> Json:
    return {"message": {"type": kind, "payload": fields}}


def keyed(state: str, **answer: object) -> Json:
    named = {"lock_state": {"args": ARGUMENTS, **answer}}
    return {"type": "tool_call", "subtype": state, "call_id": "c", "tool_call": named}


def asking(kind: str, **fields: object) -> Json:
    return {"type": f"tool{kind}", "id": "c", **fields}


def succeeded(value: object) -> Json:
    return {"status": "success", "value": value}


CALL: Final = call("c", **FUNCTION)
LINES: Final = [user(ASKED), assistant(THOUGHT, CALL), result("c", RETURNED), assistant(ANSWER)]
SESSIONS: Final[dict[str, list[Json]]] = {
    "messages": LINES,
    "envelopes, and blocks of other names": [
        {"type": "session", "id": "s1", "timestamp": "2026-03-01T08:00:00Z"},
        wrapped("user", text(ASKED)),
        {"type": "model_change", "modelId": "m"},
        wrapped("assistant", text(THOUGHT), {"type": "toolCall", "id": "c", "name": "lock_state", "arguments": ARGUMENTS}),
        wrapped("toolResult", text(RETURNED), toolCallId="c", toolName="lock_state", isError=False),
        wrapped("assistant", text(ANSWER)),
    ],
    "a role beside its message": [
        {"role": turn["role"], "message": {"content": turn["content"]}}
        for turn in (
            user([text(ASKED)]),
            assistant([text(THOUGHT), {"type": "tool_use", "name": "lock_state", "input": ARGUMENTS}]),
            user([{"type": "tool_result", "tool_use_id": "c", "content": RETURNED}]),
            assistant([text(ANSWER)]),
        )
    ],
    "events": [
        event("session.start", sessionId="s1"),
        event("user.message", content=ASKED),
        event(
            "assistant.message",
            content=THOUGHT,
            toolRequests=[{"toolCallId": "c", "name": "lock_state", "arguments": ARGUMENTS}],
        ),
        event("permission.result", toolCallId="z", toolName="lock_state", result={"decision": "approved"}),
        event("tool.execution_start", toolCallId="c", toolName="lock_state", arguments=ARGUMENTS),
        event("tool.execution_complete", toolCallId="c", success=True, result={"content": RETURNED}),
        event("assistant.message", content=ANSWER, toolRequests=[]),
    ],
    "parts of an answer": [
        {"type": "turn.prompt", "input": [text(ASKED)]},
        {"type": "context.append_message", "message": {"role": "user", "content": [text(ASKED)]}},
        loop("step.begin", step=1),
        loop("content.part", part={"type": "think", "think": THOUGHT}),
        loop("tool.call", toolCallId="c", name="lock_state", args=ARGUMENTS),
        loop("tool.result", toolCallId="c", result={"output": RETURNED}),
        loop("content.part", part=text(ANSWER)),
    ],
    "payloads": [
        {"timestamp": 1_772_352_000.0, **payload("TurnBegin", user_input=ASKED)},
        payload("ContentPart", type="think", think=THOUGHT),
        payload("ToolCall", **CALL),
        payload("ToolResult", tool_call_id="c", return_value={"is_error": False, "output": RETURNED}),
        payload("ContentPart", **text(ANSWER)),
    ],
    "calls that are named by their keys": [
        {"type": "user", "message": user([text(ASKED)])},
        {"type": "assistant", "message": assistant([text(THOUGHT)])},
        keyed("started"),
        keyed("completed", result=RETURNED),
        {"type": "assistant", "message": assistant([text(ANSWER)])},
    ],
    "types that are roles": [
        {"sessionId": "s1", "startTime": "2026-03-01T08:00:00Z"},
        {"id": "1", "type": "user", "content": [{"text": ASKED}]},
        {"$set": {"lastUpdated": "2026-03-01T08:00:00Z"}},
        {
            "id": "2",
            "type": "gemini",
            "content": THOUGHT,
            "toolCalls": [
                {
                    "id": "c",
                    "name": "lock_state",
                    "args": ARGUMENTS,
                    "status": "success",
                    "result": [{"functionResponse": {"id": "c", "name": "lock_state", "response": {"output": RETURNED}}}],
                },
            ],
        },
        {"id": "3", "type": "gemini", "content": ANSWER},
    ],
    "requests of calls": [
        {"working_dir": "/w", "message_count": 4},
        user([text(ASKED)]),
        assistant([text(THOUGHT), asking("Request", toolCall=succeeded({"name": "lock_state", "arguments": ARGUMENTS}))]),
        user([asking("Response", toolResult=succeeded([text(RETURNED)]))]),
        assistant([text(ANSWER)]),
    ],
}


@pytest.mark.parametrize("shape", SESSIONS)
def test_lines_of_a_session_are_one_run(shape: str) -> None:
    (trace,) = converted("session", *SESSIONS[shape])
    assert trace["task"]["objective"] == ASKED
    assert steps_in(trace) == STEPS
    assert trace["id"] == "kp:trace:session:s1" or "s1" not in str(SESSIONS[shape])


def test_lines_that_name_their_sessions_are_runs_of_these() -> None:
    mixed = [line | {"session_id": name} for line in LINES for name in ("s1", "s2")]
    traces = converted("", *mixed)
    assert [trace["id"] for trace in traces] == ["kp:trace:session:s1", "kp:trace:session:s2"]
    assert [steps_in(trace) for trace in traces] == [STEPS] * 2


def test_session_without_a_request_is_refused_once() -> None:
    _, refused = converted_and_refused("", [*LINES[1:]])
    (error,) = refused
    assert str(error).startswith(
        "line 1: $: expected a message of the user, which is the objective: output of an agent may lack"
    )


def test_output_of_an_agent_is_a_run_once_the_request_is_before_it() -> None:
    def item(kind: str, **fields: object) -> Json:
        return {"type": kind, "item": {"id": "i1", "type": "command_execution", "command": "ls", **fields}}

    output = [
        {"type": "thread.started", "thread_id": "t1"},
        item("item.started", aggregated_output="", exit_code=None, status="in_progress"),
        item("item.completed", aggregated_output="a", exit_code=2, status="failed"),
        {"type": "item.completed", "item": {"id": "i2", "type": "agent_message", "text": "None."}},
    ]
    (trace,) = converted("session", user("Count."), *output)
    assert trace["id"] == "kp:trace:session:t1"
    assert steps_in(trace) == [
        ("tool_call", "command_execution", 'command_execution({"command": "ls"})'),
        ("observation", "a"),
        ("thought", "None."),
    ]


def test_copy_of_a_line_counts_once_if_it_has_an_id_and_a_time() -> None:
    lines = SESSIONS["events"]
    assert steps_of("", *lines[1:], *lines[1:]) == STEPS


EXAMPLES: Final[dict[str, object]] = {"session": LINES}
