"""The shapes that messages have, each in a small sample: all say the same, and become the same steps."""

import json
from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in
from tests.unit.test_adapter_langfuse import observation

Json = dict[str, Any]

ASKED: Final = "Is the lock open?"
SAID: Final = "I ask the lock."
ARGUMENTS: Final[Json] = {"lock": 7}
RETURNED: Final = "open until six"
ANSWER: Final = "Yes, until six."
STEPS: Final = [
    ("thought", SAID),
    ("tool_call", "lock_state", 'lock_state({"lock": 7})'),
    ("observation", RETURNED),
    ("thought", ANSWER),
]
SYSTEM: Final = "You keep the locks."
FUNCTION: Final = {"name": "lock_state", "arguments": json.dumps(ARGUMENTS)}
DEFINITION: Final = {"type": "function", "function": {"name": "lock_state", "parameters": {"type": "object"}}}


def lc(name: str, **fields: object) -> Json:
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": fields}


SHAPES: Final[dict[str, tuple[object, object]]] = {
    "chat completions": (
        {
            "model": "some-model",
            "tools": [DEFINITION],
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": SAID, "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
                {"role": "tool", "tool_call_id": "c", "content": RETURNED},
            ],
        },
        {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}}], "usage": {"total": 9}},
    ),
    "responses": (
        {
            "instructions": SYSTEM,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": SAID}]},
                {"type": "function_call", "call_id": "c", **FUNCTION},
                {"type": "function_call_output", "call_id": "c", "output": RETURNED},
            ],
        },
        {"object": "response", "output": [{"type": "message", "role": "assistant", "content": ANSWER}], "tools": [DEFINITION]},
    ),
    "anthropic": (
        {
            "system": SYSTEM,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ASKED}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": SAID, "signature": "x"},
                        {"type": "tool_use", "id": "c", "name": "lock_state", "input": ARGUMENTS},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": RETURNED}]}],
                },
            ],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "text", "text": ANSWER}], "stop_reason": "end_turn"},
    ),
    "gemini": (
        {
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "contents": [
                {"role": "user", "parts": [{"text": ASKED}]},
                {"role": "model", "parts": [{"text": SAID}, {"functionCall": {"name": "lock_state", "args": ARGUMENTS}}]},
                {"role": "user", "parts": [{"function_response": {"name": "lock_state", "response": RETURNED}}]},
            ],
        },
        {"candidates": [{"content": {"role": "model", "parts": [{"text": ANSWER}]}, "finishReason": "STOP"}]},
    ),
    "langchain": (
        [
            [
                lc("SystemMessage", content=SYSTEM),
                lc("HumanMessage", content=ASKED),
                lc(
                    "AIMessageChunk",
                    content=SAID,
                    additional_kwargs={"tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
                    tool_calls=[{"id": "c", "type": "tool_call", "name": "lock_state", "args": ARGUMENTS}],
                ),
                lc("ToolMessage", content=RETURNED, tool_call_id="c", status="success"),
            ]
        ],
        {"generations": [[{"text": ANSWER, "message": lc("AIMessage", content=ANSWER)}]], "llm_output": {}},
    ),
    "langgraph": (
        {
            "messages": [
                {"type": "human", "content": ASKED, "additional_kwargs": {}},
                {
                    "type": "ai",
                    "content": SAID,
                    "additional_kwargs": {"tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
                },
                {"type": "tool", "content": RETURNED, "tool_call_id": "c"},
                {"role": "tool", "content": DEFINITION},
            ]
        },
        {"messages": [{"type": "ai", "content": ANSWER}]},
    ),
    "langchain with anthropic's blocks": (
        [
            {"type": "human", "data": {"content": ASKED}},
            {
                "type": "ai",
                "content": [
                    {"type": "text", "text": SAID},
                    {"type": "tool_use", "id": "c", "name": "lock_state", "input": ARGUMENTS},
                ],
                "tool_calls": [{"id": "c", "name": "lock_state", "args": ARGUMENTS}],
            },
            {"type": "tool", "content": RETURNED, "tool_call_id": "c"},
        ],
        {"type": "AIMessage", "content": ANSWER},
    ),
    "ai sdk": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": ASKED}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "text": SAID},
                        {"type": "tool-call", "toolCallId": "c", "toolName": "lock_state", "input": ARGUMENTS},
                    ],
                },
                {
                    "role": "tool",
                    "content": [
                        {
                            "type": "tool-result",
                            "toolCallId": "c",
                            "toolName": "lock_state",
                            "output": {"type": "text", "value": RETURNED},
                        }
                    ],
                },
            ]
        },
        ANSWER,
    ),
    "bedrock": (
        [
            {"role": "user", "content": [{"text": ASKED}]},
            {
                "role": "assistant",
                "content": [{"text": SAID}, {"toolUse": {"toolUseId": "c", "name": "lock_state", "input": ARGUMENTS}}],
            },
            {
                "role": "user",
                "content": [{"toolResult": {"toolUseId": "c", "content": [{"text": RETURNED}], "status": "success"}}],
            },
        ],
        {"output": {"message": {"role": "assistant", "content": [{"text": ANSWER}]}}},
    ),
    "autogen": (
        [
            {"type": "SystemMessage", "content": SYSTEM},
            {"type": "UserMessage", "source": "user", "content": ASKED},
            {"type": "AssistantMessage", "source": "keeper", "content": SAID},
            {"type": "AssistantMessage", "source": "keeper", "content": [{"id": "c", **FUNCTION}]},
            {
                "type": "FunctionExecutionResultMessage",
                "content": [{"call_id": "c", "name": "lock_state", "content": RETURNED, "is_error": False}],
            },
        ],
        {"content": ANSWER, "finish_reason": "stop", "usage": {}, "role": "assistant"},
    ),
    "strands": (
        [
            {"role": "user", "content": json.dumps([{"text": ASKED}])},
            {
                "message": {
                    "role": "assistant",
                    "content": [{"text": SAID}, {"toolUse": {"toolUseId": "c", "name": "lock_state", "input": ARGUMENTS}}],
                },
                "finish_reason": "tool_use",
            },
            {"role": "tool", "content": json.dumps([{"toolResult": {"toolUseId": "c", "content": [{"text": RETURNED}]}}])},
        ],
        [{"message": json.dumps([{"text": ANSWER}]), "finish_reason": "end_turn"}],
    ),
    "haystack": (
        {
            "messages": [
                {"role": "user", "meta": {}, "name": None, "content": [{"text": ASKED}]},
                {
                    "role": "assistant",
                    "content": [
                        {"text": SAID},
                        {"tool_call": {"id": "c", "tool_name": "lock_state", "arguments": ARGUMENTS}},
                    ],
                },
                {"role": "tool", "content": [{"tool_call_result": {"result": RETURNED, "error": False}}]},
            ]
        },
        {"replies": [], "message": {"role": "assistant", "content": [{"text": ANSWER}]}},
    ),
    "llamaindex": (
        {
            "messages": [
                f"ChatMessage(role=<MessageRole.USER: 'user'>, blocks=[TextBlock(block_type='text', text={ASKED!r})])",
                f"ChatMessage(role=<MessageRole.ASSISTANT: 'assistant'>, additional_kwargs={{'tool_calls': [ToolCall(id='c', "
                f"function=Function(arguments={FUNCTION['arguments']!r}, name='lock_state'))]}}, "
                f"blocks=[TextBlock(block_type='text', text={SAID!r})])",
                f"ChatMessage(role=<MessageRole.TOOL: 'tool'>, blocks=[TextBlock(block_type='text', text={RETURNED!r})])",
            ]
        },
        {"content": ANSWER},
    ),
    "calls as the json of a content": (
        [
            {"role": "user", "content": ASKED},
            {"role": "assistant", "content": SAID},
            {"role": "tool", "content": json.dumps([{"id": "c", "type": "function", "function": FUNCTION}])},
            {"role": "tool", "content": RETURNED},
        ],
        [{"role": "assistant", "content": ANSWER, "finish_reason": "stop"}],
    ),
    "as pydantic shows them": (
        {
            "messages": [
                f"role='system' content={SYSTEM!r} name=None timer=<timer object at 0x7f>",
                f"role='user' content={ASKED!r} name=None",
                f"role='assistant' content={SAID!r} tool_calls=[{{'id': 'c', 'type': 'function', 'function': {FUNCTION!r}}}]",
                f"role=<Role.TOOL: 'tool'> content={RETURNED!r} metrics=Metrics(time=0.5, tokens=3) tool_call_id='c'",
            ]
        },
        str({"role": "assistant", "content": ANSWER}),
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_store", [json.dumps, lambda value: value], ids=["as JSON", "as it is"])
def test_a_call_of_a_model_in_any_shape(shape: str, in_store: Any) -> None:
    got, put = (value if isinstance(value, str) else in_store(value) for value in SHAPES[shape])
    (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=got, output=put))
    assert trace["task"]["objective"] == ASKED
    assert steps_in(trace) == STEPS
    assert trace["steps"][1]["input"] == ARGUMENTS


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_run_got_in_any_shape_is_its_objective(shape: str) -> None:
    got, put = SHAPES[shape]
    (trace,) = converted("langfuse", observation("CHAIN", "run", 0, input=json.dumps(got), output=put))
    assert trace["task"]["objective"] == ASKED
    assert trace["outcome"]["result_summary"] == ANSWER


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("keys", [("request", "response"), ("input", "output")])
def test_a_log_of_what_was_asked_and_answered_in_any_shape(shape: str, keys: tuple[str, str]) -> None:
    got, put = SHAPES[shape]
    (trace,) = converted("", dict(zip(keys, (got, put), strict=True)))
    assert trace["task"]["objective"] == ASKED
    assert steps_in(trace) == STEPS


def test_answers_beside_what_was_asked_are_read() -> None:
    for shape in ("chat completions", "responses", "gemini"):
        got, put = SHAPES[shape]
        assert isinstance(got, dict)
        assert isinstance(put, dict)
        (trace,) = converted("", got | put)
        assert steps_in(trace) == STEPS


def test_halves_of_a_batch_are_joined() -> None:
    got, put = SHAPES["chat completions"]
    asked = {"custom_id": "b1", "method": "POST", "url": "/v1/chat/completions", "body": got}
    answered = {"id": "r1", "custom_id": "b1", "response": {"status_code": 200, "body": put}, "error": None}
    for halves in ([asked, answered], [answered, asked]):
        (trace,) = converted("", *halves)
        assert steps_in(trace) == STEPS
        assert trace["metadata"]["source_id"] == "b1"
    _, refused = converted_and_refused("", [answered | {"custom_id": "b2"}])
    assert len(refused) == 1


def test_text_of_all_messages_has_the_role_before_each() -> None:
    got = f"system: {SYSTEM}\nuser: Is it open?\nThe lock.\nassistant: None\ntool: {RETURNED}"
    (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=got, output=ANSWER))
    assert trace["task"]["objective"] == "Is it open?\nThe lock."
    assert steps_in(trace) == STEPS[2:]


@pytest.mark.parametrize(
    "wrapped",
    [
        {"messages": [["system", SYSTEM], ["user", ASKED]]},
        {"messages": [["human", ASKED]]},
        {"prompt": ASKED, "system": SYSTEM},
        {"input": ASKED},
        {"kwargs": {"question": ASKED}},
    ],
)
def test_objective_is_what_the_user_asked_without_what_it_is_wrapped_in(wrapped: Json) -> None:
    (trace,) = converted("langfuse", observation("CHAIN", "run", 0, input=wrapped, output={"answer": ANSWER, "steps": []}))
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, [("thought", ANSWER)])


def test_run_says_better_than_its_models_what_was_asked() -> None:
    prompts = [{"role": "user", "content": SYSTEM}, {"role": "user", "content": f"Question: {ASKED} Answer in German."}]
    model = observation("GENERATION", "chat", 1, input=prompts, output="Ja.", parentObservationId="run-0")
    (trace,) = converted("langfuse", [observation("AGENT", "run", 0, input=ASKED, output=ANSWER), model])
    assert trace["task"]["objective"] == ASKED
    assert steps_in(trace) == [("thought", "Ja."), ("thought", ANSWER)]


@pytest.mark.parametrize(
    "failed",
    [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}]},
        {"type": "tool", "tool_call_id": "c", "content": "no", "status": "error"},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "c", "content": [{"text": "no"}], "status": "error"}}]},
        {
            "role": "tool",
            "content": [{"type": "tool-result", "toolCallId": "c", "output": {"type": "error-text", "value": "no"}}],
        },
    ],
)
def test_failure_that_the_shape_marks_is_an_error(failed: Json) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": FUNCTION}]}
    again = {"role": "assistant", "content": None, "tool_calls": [{"id": "d", "function": FUNCTION}]}
    got = [{"role": "user", "content": ASKED}, call, failed]
    (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=got, output=again))
    assert [step["type"] for step in trace["steps"]] == ["tool_call", "observation", "error_recovery"]
    assert trace["steps"][1]["content"] == "no"


def test_tool_is_called_once_by_a_model_and_its_span_whatever_ids_and_names_they_have() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": FUNCTION}]}
    asked = [{"role": "user", "content": ASKED}]
    unnumbered = {"role": "model", "parts": [{"function_call": {"name": "lock_state", "args": ARGUMENTS}}]}
    identity = {"attributes": {"gen_ai.tool.name": "lock_state", "gen_ai.tool.call.id": "c"}}
    for put, name, metadata in (
        (calls, "running tool: lock_state", None),
        (calls, "tool: 'lock_state'", None),
        (calls, "tool.Lock", identity),
        (unnumbered, "execute_tool lock_state", json.dumps(identity)),
    ):
        tool = observation("TOOL", name, 1, input={"input": ARGUMENTS}, output=RETURNED, metadata=metadata)
        for ends_at in ("2026-02-03T08:00:00.500Z", "2026-02-03T08:00:01.750Z"):
            model = observation("GENERATION", "chat", 0, input=asked, output=put, endTime=ends_at)
            answer = observation("GENERATION", "chat", 3, input=[*asked, put], output=ANSWER)
            (trace,) = converted("langfuse", [model, tool, answer])
            assert steps_in(trace) == STEPS[1:]
            assert trace["steps"][0]["latency_ms"] == 750


def test_tools_span_without_content_that_no_model_called_is_no_call() -> None:
    call = {"role": "assistant", "content": SAID, "tool_calls": [{"id": "c", "function": FUNCTION}]}
    model = observation("GENERATION", "chat", 0, input=ASKED, output=call)
    merged = {"attributes": {"gen_ai.tool.name": "(merged tools)"}}
    tools = [
        observation("TOOL", "execute_tool (merged)", 2, input={}, output="{}", metadata=merged),
        observation("TOOL", "handoff to keeper", 2),
        observation("TOOL", "lock_state", 2, input=ARGUMENTS, output=RETURNED),
    ]
    (trace,) = converted("langfuse", [model, *tools, observation("GENERATION", "chat", 4, input=ASKED, output=ANSWER)])
    assert steps_in(trace) == STEPS


def test_none_as_the_answer_to_a_text_is_no_answer() -> None:
    first = observation("GENERATION", "chat", 0, input=f"user: {ASKED}", output="None")
    tool = observation("TOOL", "lock_state", 2, input=ARGUMENTS, output=RETURNED)
    last = observation("GENERATION", "chat", 4, input=f"user: {ASKED}\nassistant: None", output=ANSWER)
    (trace,) = converted("langfuse", [first, tool, last])
    assert steps_in(trace) == STEPS[1:]


def test_result_that_a_tools_span_lacks_is_that_of_the_next_call() -> None:
    got = SHAPES["gemini"][0]["contents"]  # type: ignore[index]
    first = observation("GENERATION", "chat", 0, input=got[:1], output=got[1])
    tool = observation("TOOL", "lock_state", 2, input={}, output={})
    (trace,) = converted("langfuse", [first, tool, observation("GENERATION", "chat", 4, input=got, output=ANSWER)])
    assert steps_in(trace) == STEPS


def test_span_around_several_calls_of_models_is_no_call() -> None:
    asked = [{"role": "user", "content": ASKED}]
    call = {"role": "assistant", "content": SAID, "tool_calls": [{"id": "c", "function": FUNCTION}]}
    result = {"role": "tool", "tool_call_id": "c", "content": RETURNED}
    outer = observation("GENERATION", "all", 0, input={"prompt": ASKED}, output=ANSWER, endTime="2026-02-03T08:00:09Z")
    inner = [
        observation("GENERATION", "step", 1, input=asked, output=call, parentObservationId="all-0"),
        observation("TOOL", "lock_state", 3, input=ARGUMENTS, output=RETURNED, parentObservationId="all-0"),
        observation("GENERATION", "step", 5, input=[*asked, call, result], output=ANSWER, parentObservationId="all-0"),
    ]
    (trace,) = converted("langfuse", [outer, *inner])
    assert steps_in(trace) == STEPS


def test_what_a_tool_returned_of_no_shape_is_kept() -> None:
    found = [{"type": "lock", "number": 7}, {"type": "lock", "number": 8}]
    got = [{"role": "user", "content": ASKED}, {"role": "tool", "tool_call_id": "c", "content": found}]
    (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=got, output=ANSWER))
    assert steps_in(trace)[0] == ("observation", json.dumps(found, sort_keys=True))


def test_answer_has_its_calls_beside_its_text() -> None:
    calls = [{"toolCallType": "function", "toolCallId": "c", "toolName": "lock_state", "args": FUNCTION["arguments"]}]
    for put in ({"text": SAID, "toolCalls": calls}, {"text": SAID, "toolCalls": json.dumps(calls)}):
        (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=ASKED, output=put))
        assert steps_in(trace) == STEPS[:2]
    (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=ASKED, output=f"assistant: {ANSWER}"))
    assert steps_in(trace) == STEPS[3:]


@pytest.mark.parametrize(
    "put",
    [
        {"type": "tool", "content": RETURNED, "tool_call_id": "c", "status": "success"},
        f"content={RETURNED!r} name='lock_state' tool_call_id='c'",
        {"content": [{"type": "text", "text": RETURNED}], "isError": False},
        {"id": "c", "name": "lock_state", "response": RETURNED},
        {"type": "text", "value": RETURNED},
        {"id": "c", "message": json.dumps([{"text": RETURNED}])},
    ],
)
def test_result_of_a_tool_is_taken_out_of_its_envelope(put: object) -> None:
    asked = observation("GENERATION", "chat", 0, input=ASKED, output=ANSWER)
    named = {"attributes": {"openinference.span.kind": "TOOL", "tool.name": "lock_state"}}
    tool = observation("SPAN", "Lock.run", 2, input=str(ARGUMENTS), output=put, metadata=named)
    (trace,) = converted("langfuse", [asked, tool])
    assert steps_in(trace)[1:] == STEPS[1:3]


def test_calls_that_lose_their_ids_where_they_are_repeated_are_the_same() -> None:
    calls: list[Json] = [{"functionCall": {"id": f"f{n}", "name": "lock_state", "args": ARGUMENTS}} for n in range(2)]
    repeated = [{"functionCall": {"name": "lock_state", "args": ARGUMENTS}}] * 2
    results = [{"functionResponse": {"name": "lock_state", "response": text}} for text in ("open", "shut")]
    asked = {"role": "user", "parts": [{"text": ASKED}]}
    got = [asked, {"role": "model", "parts": repeated}, {"role": "user", "parts": results}]
    first = observation("GENERATION", "chat", 0, input=[asked], output={"role": "model", "parts": calls})
    tools = [
        observation("TOOL", "lock", n, input={}, output={}, metadata={"attributes": {"gen_ai.tool.name": "lock_state", **own}})
        for n, own in ((1, {"gen_ai.tool.call.id": "f0"}), (2, {"gen_ai.tool.call.id": "f1"}))
    ]
    last = observation("GENERATION", "chat", 4, input={"contents": got}, output=ANSWER)
    late = first | {"endTime": "2026-02-03T08:00:03.500Z"}
    for spans in ([first, last], [first, *tools, last], [late, *tools, last]):
        (trace,) = converted("langfuse", spans)
        contents = [step["content"] for step in trace["steps"]]
        assert sorted(contents) == sorted([STEPS[1][2]] * 2 + ["open", "shut", ANSWER])


def test_what_is_not_understood_around_the_models_does_not_refuse_the_run() -> None:
    state = {"messages": [{"role": "user", "content": ASKED}, {"role": "narrator", "content": "It rains."}]}
    inner = [{"type": "human", "content": ASKED}, {"type": "remove", "id": "x"}]
    model = observation("GENERATION", "chat", 1, input=inner, output=ANSWER)
    (trace,) = converted("langfuse", [observation("CHAIN", "run", 0, input=state, output=state), model])
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, STEPS[3:])


def test_object_that_a_model_puts_out_keeps_its_fields() -> None:
    put = {"text": "open", "sure": 0.5}
    (trace,) = converted("langfuse", observation("GENERATION", "chat", 0, input=ASKED, output=put))
    assert steps_in(trace) == [("thought", json.dumps(put, sort_keys=True))]
