"""Spans in the rows of other stores become traces: LangSmith, Opik, Braintrust, Weave, MLflow, Phoenix, the Agents SDK."""

import json
from typing import Any, Final

import pytest

from tests.support.converting import converted, steps_in
from tests.unit.test_adapter_openai import assistant, call, result, user
from tests.unit.test_message_shapes import ANSWER, ARGUMENTS, ASKED, FUNCTION, RETURNED, STEPS

Json = dict[str, Any]

USER: Final = user(ASKED)
CALLED: Final = assistant(None, call("c", **FUNCTION))
ANSWERED: Final = assistant(ANSWER)


def at(second: int) -> str:
    return f"2026-05-01T10:00:{second:02}Z"


def of_langsmith(own: str, kind: str, name: str, second: int, got: Json, put: Json, *inner: Json) -> Json:
    ids = {"id": own, "trace_id": "r0", "parent_run_id": None if own == "r0" else "r0"}
    times = {"start_time": at(second), "end_time": at(second + 1)}
    return ids | times | {"run_type": kind, "name": name, "inputs": got, "outputs": put, "child_runs": list(inner)}


LANGSMITH: Final = of_langsmith(
    *("r0", "chain", "agent", 0, {"input": ASKED}, {"output": ANSWER}),
    of_langsmith("r1", "llm", "chat", 1, {"messages": [USER]}, {"choices": [{"message": CALLED}]}),
    of_langsmith("r2", "tool", "lock_state", 3, ARGUMENTS, {"output": RETURNED}),
)


def of_opik(own: str, kind: str, name: str, got: object, put: object) -> Json:
    return {"id": own, "trace_id": "r0", "type": kind, "name": name, "input": got, "output": put}


OPIK: Final = {
    "id": "r0",
    "project_id": "p",
    "start_time": at(0),
    "input": {"question": ASKED},
    "output": {"answer": ANSWER},
    "spans": [
        of_opik("s1", "llm", "chat", {"messages": [USER]}, {"choices": [{"message": CALLED}]}),
        of_opik("s2", "tool", "lock_state", ARGUMENTS, {"output": RETURNED}),
    ],
}


def of_braintrust(own: str, kind: str, name: str, second: int, got: object, put: object) -> Json:
    ids = {"span_id": own, "root_span_id": "r0", "span_parents": None if own == "r0" else ["r0"]}
    return ids | {"created": at(second), "span_attributes": {"name": name, "type": kind}, "input": got, "output": put}


BRAINTRUST: Final = [
    of_braintrust("r0", "task", "agent", 0, {"question": ASKED}, ANSWER),
    of_braintrust("s1", "llm", "chat", 1, [USER], [{"message": CALLED}]),
    of_braintrust("s2", "tool", "lock_state", 2, ARGUMENTS, RETURNED),
]


def of_agents_sdk(own: str, second: int, **data: object) -> Json:
    ids = {"object": "trace.span", "id": own, "trace_id": "r0", "parent_id": None}
    return ids | {"started_at": at(second), "ended_at": at(second + 1), "span_data": data}


AGENTS_SDK: Final = [
    {"object": "trace", "id": "r0", "workflow_name": "tides"},
    of_agents_sdk("s1", 0, type="generation", input=[USER], output=[CALLED]),
    of_agents_sdk("s2", 2, type="function", name="lock_state", input=FUNCTION["arguments"], output=RETURNED),
    of_agents_sdk("s3", 4, type="generation", input=[USER], output=[ANSWERED]),
]
PHOENIX: Final = {
    "context.trace_id": "r0",
    "context.span_id": "s1",
    "parent_id": None,
    "span_kind": "LLM",
    "name": "chat",
    "start_time": 1_777_629_600_000,
    "end_time": 1_777_629_601_000,
    "status_code": "OK",
    "attributes.llm.input_messages": [{"message.role": "user", "message.content": ASKED}],
    "attributes.llm.output_messages": [{"message.role": "assistant", "message.content": ANSWER}],
}
WEAVE: Final = {
    "id": "s1",
    "op_name": "weave:///e/p/op/chat:v1",
    "trace_id": "r0",
    "parent_id": None,
    "started_at": at(0),
    "inputs": {"messages": [USER]},
    "output": {"choices": [{"message": ANSWERED}]},
}
MLFLOW: Final = {
    "info": {"trace_id": "tr-1"},
    "data": {
        "spans": [
            {
                "trace_id": "r0",
                "span_id": "s1",
                "parent_span_id": None,
                "name": "agent",
                "start_time_unix_nano": 1_777_629_600_000_000_000,
                "end_time_unix_nano": 1_777_629_601_000_000_000,
                "attributes": {
                    "mlflow.spanType": '"AGENT"',
                    "mlflow.spanInputs": json.dumps({"question": ASKED}),
                    "mlflow.spanOutputs": json.dumps(ANSWER),
                },
            }
        ]
    },
}
OTLP: Final = {
    "traceId": "r0",
    "spanId": "s1",
    "name": "chat",
    "startTimeUnixNano": "1777629600000000000",
    "endTimeUnixNano": "1777629601000000000",
    "attributes": {"span.kind": "llm", "input.value": json.dumps({"messages": [USER]}), "output.value": ANSWER},
}
WITH_TOOLS: Final[dict[str, list[object]]] = {
    "langsmith": [LANGSMITH],
    "opik": [OPIK],
    "braintrust": [*BRAINTRUST],
    "agents sdk": [*AGENTS_SDK],
}


@pytest.mark.parametrize("store", WITH_TOOLS)
def test_rows_of_a_trace_are_a_run(store: str) -> None:
    (trace,) = converted("", *WITH_TOOLS[store])
    assert trace["id"] == "kp:trace:span-rows:r0"
    assert trace["task"]["objective"] == ASKED
    assert sorted(steps_in(trace)) == sorted(STEPS[1:])
    assert trace["outcome"]["result_summary"] == ANSWER
    assert trace["metadata"]["created_at"].startswith("2026-05-01T10:00:00")


@pytest.mark.parametrize(
    "source",
    [WEAVE, MLFLOW, [PHOENIX], {"data": [WEAVE]}, {"spans": [OTLP]}],
    ids=["Weave", "MLflow", "Phoenix", "a page", "a page of the protocol's spans"],
)
def test_span_alone_is_a_run(source: object) -> None:
    (trace,) = converted("", source)
    assert (trace["id"], trace["task"]["objective"], steps_in(trace)) == ("kp:trace:span-rows:r0", ASKED, [STEPS[-1]])


def test_messages_that_rows_of_no_kind_copy_count_once() -> None:
    messages = [USER, CALLED, result("c", RETURNED), ANSWERED]
    rows = [
        of_langsmith("r0", "", "graph", 0, {"messages": messages[:1]}, {"messages": messages}) | {"end_time": at(9)},
        of_langsmith("r1", "", "agent", 1, {"messages": messages[:1]}, {"messages": messages[1:2]}),
        of_langsmith("r2", "", "chat", 1, {"messages": messages[:1]}, {"choices": [{"message": CALLED}]}),
        of_langsmith("r3", "", "route", 2, {"messages": messages[:2]}, {"output": "tools"}),
        of_langsmith("r4", "", "lock_state", 3, ARGUMENTS, {"output": messages[2]}),
        of_langsmith("r5", "", "chat", 5, {"messages": messages[:3]}, {"choices": [{"message": ANSWERED}]}),
    ]
    without_kinds = [{key: row[key] for key in row if key not in ("run_type", "parent_run_id")} for row in rows]
    for sources in (without_kinds, without_kinds[::-1], [LANGSMITH]):
        (trace,) = converted("", *sources)
        assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, STEPS[1:])


def test_error_of_a_row_is_one() -> None:
    failed = BRAINTRUST[2] | {"error": "station offline", "output": None}
    again = BRAINTRUST[2] | {"span_id": "s3", "created": at(5)}
    (trace,) = converted("", *BRAINTRUST[:2], failed, again)
    assert [step["type"] for step in trace["steps"]][:3] == ["tool_call", "observation", "error_recovery"]


REFUSED: Final = {
    "span-rows": [
        (7, "$"),
        (BRAINTRUST[0] | {"root_span_id": 5}, "traceId"),
        ({key: value for key, value in LANGSMITH.items() if key != "trace_id"}, "traceId"),
    ]
}
EXAMPLES: Final[dict[str, object]] = {"span-rows": LANGSMITH}
