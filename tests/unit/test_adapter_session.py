"""Sessions with one message, event or part on each line become traces, whichever agent wrote them."""

from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in, steps_of
from tests.unit.test_adapter_openai import assistant, call, result, user

Json = dict[str, Any]

ASKED: Final = "When is high water?"
STEPS: Final = [
    ("thought", "I look it up."),
    ("tool_call", "tide_table", 'tide_table({"port": "Esbjerg"})'),
    ("observation", "04:12"),
    ("thought", "At 04:12."),
]
ARGUMENTS: Final = {"port": "Esbjerg"}


def text(content: str) -> Json:
    return {"type": "text", "text": content}


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
    named = {"tide_table": {"args": ARGUMENTS, **answer}}
    return {"type": "tool_call", "subtype": state, "call_id": "c", "tool_call": named}


def asking(kind: str, **fields: object) -> Json:
    return {"type": f"tool{kind}", "id": "c", **fields}


def succeeded(value: object) -> Json:
    return {"status": "success", "value": value}


CALL: Final = call("c", "tide_table", '{"port": "Esbjerg"}')
LINES: Final = [user(ASKED), assistant("I look it up.", CALL), result("c", "04:12"), assistant("At 04:12.")]
SESSIONS: Final[dict[str, list[Json]]] = {
    "messages": LINES,
    "envelopes, and blocks of other names": [
        {"type": "session", "id": "s1", "timestamp": "2026-03-01T08:00:00Z"},
        wrapped("user", text(ASKED)),
        {"type": "model_change", "modelId": "m"},
        wrapped(
            "assistant", text("I look it up."), {"type": "toolCall", "id": "c", "name": "tide_table", "arguments": ARGUMENTS}
        ),
        wrapped("toolResult", text("04:12"), toolCallId="c", toolName="tide_table", isError=False),
        wrapped("assistant", text("At 04:12.")),
    ],
    "a role beside its message": [
        {"role": turn["role"], "message": {"content": turn["content"]}}
        for turn in (
            user([text(ASKED)]),
            assistant([text("I look it up."), {"type": "tool_use", "name": "tide_table", "input": ARGUMENTS}]),
            user([{"type": "tool_result", "tool_use_id": "c", "content": "04:12"}]),
            assistant([text("At 04:12.")]),
        )
    ],
    "events": [
        event("session.start", sessionId="s1"),
        event("user.message", content=ASKED),
        event(
            "assistant.message",
            content="I look it up.",
            toolRequests=[{"toolCallId": "c", "name": "tide_table", "arguments": ARGUMENTS}],
        ),
        event("permission.result", toolCallId="z", toolName="tide_table", result={"decision": "approved"}),
        event("tool.execution_start", toolCallId="c", toolName="tide_table", arguments=ARGUMENTS),
        event("tool.execution_complete", toolCallId="c", success=True, result={"content": "04:12"}),
        event("assistant.message", content="At 04:12.", toolRequests=[]),
    ],
    "parts of an answer": [
        {"type": "turn.prompt", "input": [text(ASKED)]},
        {"type": "context.append_message", "message": {"role": "user", "content": [text(ASKED)]}},
        loop("step.begin", step=1),
        loop("content.part", part={"type": "think", "think": "I look it up."}),
        loop("tool.call", toolCallId="c", name="tide_table", args=ARGUMENTS),
        loop("tool.result", toolCallId="c", result={"output": "04:12"}),
        loop("content.part", part=text("At 04:12.")),
    ],
    "payloads": [
        {"timestamp": 1_772_352_000.0, **payload("TurnBegin", user_input=ASKED)},
        payload("ContentPart", type="think", think="I look it up."),
        payload("ToolCall", **CALL),
        payload("ToolResult", tool_call_id="c", return_value={"is_error": False, "output": "04:12"}),
        payload("ContentPart", **text("At 04:12.")),
    ],
    "calls that are named by their keys": [
        {"type": "user", "message": user([text(ASKED)])},
        {"type": "assistant", "message": assistant([text("I look it up.")])},
        keyed("started"),
        keyed("completed", result="04:12"),
        {"type": "assistant", "message": assistant([text("At 04:12.")])},
    ],
    "types that are roles": [
        {"sessionId": "s1", "startTime": "2026-03-01T08:00:00Z"},
        {"id": "1", "type": "user", "content": [{"text": ASKED}]},
        {"$set": {"lastUpdated": "2026-03-01T08:00:00Z"}},
        {
            "id": "2",
            "type": "gemini",
            "content": "I look it up.",
            "toolCalls": [
                {
                    "id": "c",
                    "name": "tide_table",
                    "args": ARGUMENTS,
                    "status": "success",
                    "result": [{"functionResponse": {"id": "c", "name": "tide_table", "response": {"output": "04:12"}}}],
                },
            ],
        },
        {"id": "3", "type": "gemini", "content": "At 04:12."},
    ],
    "requests of calls": [
        {"working_dir": "/w", "message_count": 4},
        user([text(ASKED)]),
        assistant(
            [text("I look it up."), asking("Request", toolCall=succeeded({"name": "tide_table", "arguments": ARGUMENTS}))]
        ),
        user([asking("Response", toolResult=succeeded([text("04:12")]))]),
        assistant([text("At 04:12.")]),
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
