"""A small sample of each shape that messages have: all say the same, and become the same steps."""

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.support.converting import converted, converted_and_refused, steps_in
from tests.unit.test_adapter_langfuse import in_store, observation

Json = dict[str, Any]

ASKED: Final = "Is the lock open?"
THOUGHT: Final = "I ask the lock."
ARGUMENTS: Final[Json] = {"lock": 7}
RETURNED: Final = "open until six"
ANSWER: Final = "Yes, until six."
STEPS: Final = [
    ("thought", THOUGHT),
    ("tool_call", "lock_state", 'lock_state({"lock": 7})'),
    ("observation", RETURNED),
    ("thought", ANSWER),
]
SYSTEM: Final = "You keep the locks."
FUNCTION: Final = {"name": "lock_state", "arguments": json.dumps(ARGUMENTS)}
DEFINITION: Final = {"type": "function", "function": {"name": "lock_state", "parameters": {"type": "object"}}}
CALL: Final = {"id": "c", "type": "function", "function": FUNCTION}
USE: Final = {"type": "tool_use", "id": "c", "name": "lock_state", "input": ARGUMENTS}
BEDROCK_USE: Final = {"toolUse": {"toolUseId": "c", "name": "lock_state", "input": ARGUMENTS}}


def by(role: str, content: object, **fields: object) -> Json:
    return {"role": role, "content": content, **fields}


def of_type(kind: str, content: object, **fields: object) -> Json:
    return {"type": kind, "content": content, **fields}


def lc(name: str, content: str, **fields: object) -> Json:
    kwargs = {"content": content, **fields}
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", name], "kwargs": kwargs}


def text(content: str, kind: str = "text") -> Json:
    return {"type": kind, "text": content}


def printed(role: str, content: str, extra: str = "") -> str:
    """Return a message as LlamaIndex prints it."""
    return f"ChatMessage(role=<MessageRole.{role}>, {extra}blocks=[TextBlock(block_type='text', text={content!r})])"


def bedrock_result(**fields: object) -> Json:
    return {"toolResult": {"toolUseId": "c", "content": [{"text": RETURNED}], **fields}}


CALLED: Final = by("assistant", THOUGHT, tool_calls=[CALL])
CHAT: Final = [by("user", ASKED), CALLED, by("tool", RETURNED, tool_call_id="c")]
SHAPES: Final[dict[str, tuple[object, object]]] = {
    "chat completions": (
        {"model": "some-model", "tools": [DEFINITION], "messages": [by("system", SYSTEM), *CHAT]},
        {"id": "x", "choices": [{"index": 0, "message": by("assistant", ANSWER)}], "usage": {"total": 9}},
    ),
    "responses": (
        {
            "instructions": SYSTEM,
            "input": [
                by("user", [text(ASKED, "input_text")]),
                by("assistant", [text(THOUGHT, "output_text")], type="message"),
                {"type": "function_call", "call_id": "c", **FUNCTION},
                {"type": "function_call_output", "call_id": "c", "output": RETURNED},
            ],
        },
        {"object": "response", "output": [by("assistant", ANSWER, type="message")], "tools": [DEFINITION]},
    ),
    "anthropic": (
        {
            "system": SYSTEM,
            "messages": [
                by("user", [text(ASKED)]),
                by("assistant", [{"type": "thinking", "thinking": THOUGHT, "signature": "x"}, USE]),
                by("user", [{"type": "tool_result", "tool_use_id": "c", "content": [text(RETURNED)]}]),
            ],
        },
        by("assistant", [text(ANSWER)], type="message", stop_reason="end_turn"),
    ),
    "gemini": (
        {
            "systemInstruction": {"parts": [{"text": SYSTEM}]},
            "contents": [
                {"role": "user", "parts": [{"text": ASKED}]},
                {"role": "model", "parts": [{"text": THOUGHT}, {"functionCall": {"name": "lock_state", "args": ARGUMENTS}}]},
                {"role": "user", "parts": [{"function_response": {"name": "lock_state", "response": RETURNED}}]},
            ],
        },
        {"candidates": [{"content": {"role": "model", "parts": [{"text": ANSWER}]}, "finishReason": "STOP"}]},
    ),
    "cohere": (
        {
            "messages": [
                by("user", ASKED),
                {"role": "assistant", "tool_plan": THOUGHT, "tool_calls": [CALL]},
                by("tool", [{"type": "document", "document": {"data": RETURNED}}], tool_call_id="c"),
            ]
        },
        {"id": "x", "finish_reason": "COMPLETE", "message": by("assistant", [text(ANSWER)]), "usage": {}},
    ),
    "langchain": (
        [
            [
                lc("SystemMessage", SYSTEM),
                lc("HumanMessage", ASKED),
                lc(
                    "AIMessageChunk",
                    THOUGHT,
                    additional_kwargs={"tool_calls": [CALL]},
                    tool_calls=[{"id": "c", "type": "tool_call", "name": "lock_state", "args": ARGUMENTS}],
                ),
                lc("ToolMessage", RETURNED, tool_call_id="c", status="success"),
            ]
        ],
        {"generations": [[{"text": ANSWER, "message": lc("AIMessage", ANSWER)}]], "llm_output": {}},
    ),
    "langgraph": (
        {
            "messages": [
                of_type("human", ASKED, additional_kwargs={}),
                of_type("ai", THOUGHT, additional_kwargs={"tool_calls": [CALL]}),
                of_type("tool", RETURNED, tool_call_id="c"),
                by("tool", DEFINITION),
            ]
        },
        {"messages": [of_type("ai", ANSWER)]},
    ),
    "langchain with anthropic's blocks": (
        [
            {"type": "human", "data": {"content": ASKED}},
            of_type("ai", [text(THOUGHT), USE], tool_calls=[{"id": "c", "name": "lock_state", "args": ARGUMENTS}]),
            of_type("tool", RETURNED, tool_call_id="c"),
        ],
        of_type("AIMessage", ANSWER),
    ),
    "ai sdk": (
        {
            "messages": [
                by("user", [text(ASKED)]),
                by(
                    "assistant",
                    [
                        text(THOUGHT, "reasoning"),
                        {"type": "tool-call", "toolCallId": "c", "toolName": "lock_state", "input": ARGUMENTS},
                    ],
                ),
                by("tool", [{"type": "tool-result", "toolCallId": "c", "output": {"type": "text", "value": RETURNED}}]),
            ]
        },
        ANSWER,
    ),
    "bedrock": (
        [
            by("user", [{"text": ASKED}]),
            by("assistant", [{"text": THOUGHT}, BEDROCK_USE]),
            by("user", [bedrock_result(status="success")]),
        ],
        {"output": {"message": by("assistant", [{"text": ANSWER}])}},
    ),
    "autogen": (
        [
            of_type("SystemMessage", SYSTEM),
            of_type("UserMessage", ASKED, source="user"),
            of_type("AssistantMessage", THOUGHT, source="keeper"),
            of_type("AssistantMessage", [{"id": "c", **FUNCTION}], source="keeper"),
            of_type(
                "FunctionExecutionResultMessage",
                [{"call_id": "c", "name": "lock_state", "content": RETURNED, "is_error": False}],
            ),
        ],
        by("assistant", ANSWER, finish_reason="stop", usage={}),
    ),
    "strands": (
        [
            by("user", json.dumps([{"text": ASKED}])),
            {"message": by("assistant", [{"text": THOUGHT}, BEDROCK_USE]), "finish_reason": "tool_use"},
            by("tool", json.dumps([bedrock_result()])),
        ],
        [{"message": json.dumps([{"text": ANSWER}]), "finish_reason": "end_turn"}],
    ),
    "haystack": (
        {
            "messages": [
                by("user", [{"text": ASKED}], meta={}, name=None),
                by(
                    "assistant",
                    [{"text": THOUGHT}, {"tool_call": {"id": "c", "tool_name": "lock_state", "arguments": ARGUMENTS}}],
                ),
                by("tool", [{"tool_call_result": {"result": RETURNED, "error": False}}]),
            ]
        },
        {"replies": [], "message": by("assistant", [{"text": ANSWER}])},
    ),
    "llamaindex": (
        {
            "messages": [
                printed("USER: 'user'", ASKED),
                printed(
                    "ASSISTANT: 'assistant'",
                    THOUGHT,
                    "additional_kwargs={'tool_calls': [ToolCall(id='c', "
                    f"function=Function(arguments={FUNCTION['arguments']!r}, name='lock_state'))]}}, ",
                ),
                printed("TOOL: 'tool'", RETURNED),
            ]
        },
        {"content": ANSWER},
    ),
    "calls as the json of a content": (
        [by("user", ASKED), by("assistant", THOUGHT), by("tool", json.dumps([CALL])), by("tool", RETURNED)],
        [by("assistant", ANSWER, finish_reason="stop")],
    ),
    "as pydantic shows them": (
        {
            "messages": [
                f"role='system' content={SYSTEM!r} name=None timer=<timer object at 0x7f>",
                f"role='user' content={ASKED!r} name=None",
                f"role='assistant' content={THOUGHT!r} tool_calls=[{CALL!r}]",
                f"role=<Role.TOOL: 'tool'> content={RETURNED!r} metrics=Metrics(time=0.5, tokens=3) tool_call_id='c'",
            ]
        },
        str(by("assistant", ANSWER)),
    ),
}


def generation(got: object, put: object, second: int = 0, **more: object) -> Json:
    """Return a call of a model as Langfuse records it."""
    return observation("GENERATION", "chat", second, input=got, output=put, **more)


def trace_of(*sources: object) -> Json:
    (trace,) = converted("langfuse", list(sources))
    return trace


RECORDS: Final[dict[str, Callable[[Any, Any], Json]]] = {
    "a generation": generation,
    "a generation as JSON": lambda got, put: generation(in_store(got), in_store(put)),
    "a request and its response": lambda got, put: {"request": got, "response": put},
    "an input and its output": lambda got, put: {"input": got, "output": put},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("record", RECORDS)
def test_a_call_of_a_model_in_any_shape(shape: str, record: str) -> None:
    (trace,) = converted("", RECORDS[record](*SHAPES[shape]))
    assert trace["task"]["objective"] == ASKED
    assert steps_in(trace) == STEPS
    assert trace["steps"][1]["input"] == ARGUMENTS


@pytest.mark.parametrize("shape", SHAPES)
def test_input_of_a_run_in_any_shape_is_its_objective(shape: str) -> None:
    got, put = SHAPES[shape]
    trace = trace_of(observation("CHAIN", "run", 0, input=json.dumps(got), output=put))
    assert trace["task"]["objective"] == ASKED
    assert trace["outcome"]["result_summary"] == ANSWER


@pytest.mark.parametrize("shape", ["chat completions", "responses", "gemini"])
def test_answers_recorded_beside_their_questions_and_lines_of_a_batch_are_read(shape: str) -> None:
    got, put = SHAPES[shape]
    assert isinstance(got, dict)
    assert isinstance(put, dict)
    for record in (got | put, {"request": {"body": got}, "response": {"status_code": 200, "body": put}}):
        (trace,) = converted("", record)
        assert steps_in(trace) == STEPS


def test_halves_of_a_batch_are_joined() -> None:
    got, put = SHAPES["chat completions"]
    assert isinstance(put, dict)
    asked = {"custom_id": "b1", "method": "POST", "url": "/v1/chat/completions", "body": got}
    answered = {"id": "r1", "custom_id": "b1", "response": {"status_code": 200, "body": put | {"created": 1_767_225_600}}}
    for halves in ([asked, answered], [answered, asked]):
        (trace,) = converted("", *halves)
        assert steps_in(trace) == STEPS
        assert trace["metadata"]["source_id"] == "b1"
        assert trace["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"
    _, refused = converted_and_refused("", [answered | {"custom_id": "b2"}])
    assert len(refused) == 1


def test_text_of_all_messages_has_the_role_before_each() -> None:
    got = f"system: {SYSTEM}\nuser: Is it open?\nThe lock.\nassistant: None\ntool: {RETURNED}"
    trace = trace_of(generation(got, ANSWER))
    assert trace["task"]["objective"] == "Is it open?\nThe lock."
    assert steps_in(trace) == STEPS[2:]


@pytest.mark.parametrize("arguments", [json.dumps(ARGUMENTS), "'" + json.dumps(ARGUMENTS) + "'"], ids=["json", "a text"])
def test_chat_of_one_text_is_a_run_with_its_calls(arguments: str) -> None:
    called = f'{THOUGHT} <functioncall> {{"name": "lock_state", "arguments": {arguments}}} <|endoftext|>'
    chat = f"USER: {ASKED}\n\nASSISTANT: {called}\n\nFUNCTION RESPONSE: {RETURNED}\n\nASSISTANT: {ANSWER} <|endoftext|>\n"
    for source in ({"system": f"SYSTEM: {SYSTEM}", "chat": chat}, {"sample": f"SYSTEM: {SYSTEM}\n{chat}"}):
        (trace,) = converted("", source)
        assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, STEPS)
        assert trace["steps"][1]["input"] == ARGUMENTS


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
def test_objective_is_the_request_of_the_user_without_its_wrapping(wrapped: Json) -> None:
    trace = trace_of(observation("CHAIN", "run", 0, input=wrapped, output={"answer": ANSWER, "steps": []}))
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, [("thought", ANSWER)])


def test_the_outermost_span_has_the_question_in_better_words_than_the_models() -> None:
    prompts = [by("user", SYSTEM), by("user", f"Question: {ASKED} Answer in German.")]
    run = observation("AGENT", "run", 0, input=ASKED, output=ANSWER)
    trace = trace_of(run, generation(prompts, "Ja.", 1, parentObservationId="run-0"))
    assert trace["task"]["objective"] == ASKED
    assert steps_in(trace) == [("thought", "Ja."), ("thought", ANSWER)]


@pytest.mark.parametrize(
    "failed",
    [
        by("user", [{"type": "tool_result", "tool_use_id": "c", "content": "no", "is_error": True}]),
        of_type("tool", "no", tool_call_id="c", status="error"),
        by("user", [{"toolResult": {"toolUseId": "c", "content": [{"text": "no"}], "status": "error"}}]),
        by("tool", [{"type": "tool-result", "toolCallId": "c", "output": {"type": "error-text", "value": "no"}}]),
    ],
)
def test_failure_that_the_shape_marks_is_an_error(failed: Json) -> None:
    again = by("assistant", None, tool_calls=[{"id": "d", "function": FUNCTION}])
    trace = trace_of(generation([by("user", ASKED), by("assistant", None, tool_calls=[CALL]), failed], again))
    assert [step["type"] for step in trace["steps"]] == ["tool_call", "observation", "error_recovery"]
    assert trace["steps"][1]["content"] == "no"


UNNUMBERED: Final = {"role": "model", "parts": [{"function_call": {"name": "lock_state", "args": ARGUMENTS}}]}
IDENTITY: Final = {"attributes": {"gen_ai.tool.name": "lock_state", "gen_ai.tool.call.id": "c"}}


@pytest.mark.parametrize(
    ("put", "name", "metadata"),
    [
        (by("assistant", None, tool_calls=[CALL]), "running tool: lock_state", None),
        (by("assistant", None, tool_calls=[CALL]), "tool: 'lock_state'", None),
        (by("assistant", None, tool_calls=[CALL]), "tool.Lock", IDENTITY),
        (UNNUMBERED, "execute_tool lock_state", json.dumps(IDENTITY)),
    ],
)
@pytest.mark.parametrize("ends_at", ["2026-02-03T08:00:00.500Z", "2026-02-03T08:00:01.750Z"], ids=["before it", "meanwhile"])
def test_a_model_call_and_the_span_of_its_tool_are_one_call_whatever_their_ids_and_names(
    put: Json, name: str, metadata: object, ends_at: str
) -> None:
    asked = [by("user", ASKED)]
    tool = observation("TOOL", name, 1, input={"input": ARGUMENTS}, output=RETURNED, metadata=metadata)
    trace = trace_of(generation(asked, put, endTime=ends_at), tool, generation([*asked, put], ANSWER, 3))
    assert steps_in(trace) == STEPS[1:]
    assert trace["steps"][0]["latency_ms"] == 750


TOOL: Final = observation("TOOL", "lock_state", 2, input=ARGUMENTS, output=RETURNED)


def test_tools_span_without_content_that_no_model_called_is_no_call() -> None:
    merged = {"attributes": {"gen_ai.tool.name": "(merged tools)"}}
    tools = [
        observation("TOOL", "execute_tool (merged)", 2, input={}, output="{}", metadata=merged),
        observation("TOOL", "handoff to keeper", 2),
        TOOL,
    ]
    assert steps_in(trace_of(generation(ASKED, CALLED), *tools, generation(ASKED, ANSWER, 4))) == STEPS


def test_none_as_the_answer_to_a_text_is_no_answer() -> None:
    last = generation(f"user: {ASKED}\nassistant: None", ANSWER, 4)
    assert steps_in(trace_of(generation(f"user: {ASKED}", "None"), TOOL, last)) == STEPS[1:]


def test_result_that_a_tools_span_lacks_is_that_of_the_next_call() -> None:
    got = SHAPES["gemini"][0]["contents"]  # type: ignore[index]
    tool = observation("TOOL", "lock_state", 2, input={}, output={})
    assert steps_in(trace_of(generation(got[:1], got[1]), tool, generation(got, ANSWER, 4))) == STEPS


def test_span_around_several_calls_of_models_is_no_call() -> None:
    outer = observation("GENERATION", "all", 0, input={"prompt": ASKED}, output=ANSWER, endTime="2026-02-03T08:00:09Z")
    inner = [generation(CHAT[:1], CALLED, 1), TOOL, generation(CHAT, ANSWER, 5)]
    assert steps_in(trace_of(outer, *(each | {"parentObservationId": "all-0"} for each in inner))) == STEPS


@pytest.mark.parametrize("returned", [{"type": "lock", "number": 7}, [{"type": "lock", "number": 7}] * 2])
def test_results_of_tools_in_unknown_shapes_are_kept(returned: object) -> None:
    trace = trace_of(generation([by("user", ASKED), by("tool", returned, tool_call_id="c")], ANSWER))
    assert steps_in(trace)[0] == ("observation", json.dumps(returned, sort_keys=True))


ANSWERED_CALLS: Final = [
    {"toolCallType": "function", "toolCallId": "c", "toolName": "lock_state", "args": FUNCTION["arguments"]}
]


@pytest.mark.parametrize(
    ("put", "expected"),
    [
        ({"text": THOUGHT, "toolCalls": ANSWERED_CALLS}, STEPS[:2]),
        ({"text": THOUGHT, "toolCalls": json.dumps(ANSWERED_CALLS)}, STEPS[:2]),
        (f"assistant: {ANSWER}", STEPS[3:]),
        ({"text": "open", "sure": 0.5}, [("thought", '{"sure": 0.5, "text": "open"}')]),
        ({"content": {"lock": 7}}, [("thought", '{"content": {"lock": 7}}')]),
    ],
    ids=["calls beside a text", "calls as JSON", "a role before a text", "an object of its own fields", "an object as content"],
)
def test_answer_is_a_text_with_its_calls_or_any_object(put: object, expected: list[tuple[str, ...]]) -> None:
    assert steps_in(trace_of(generation(ASKED, put))) == expected


@pytest.mark.parametrize(
    "put",
    [
        of_type("tool", RETURNED, tool_call_id="c", status="success"),
        f"content={RETURNED!r} name='lock_state' tool_call_id='c'",
        {"content": [text(RETURNED)], "isError": False},
        {"id": "c", "name": "lock_state", "response": RETURNED},
        {"type": "text", "value": RETURNED},
        {"id": "c", "message": json.dumps([{"text": RETURNED}])},
    ],
)
def test_result_of_a_tool_is_taken_out_of_its_envelope(put: object) -> None:
    named = {"attributes": {"openinference.span.kind": "TOOL", "tool.name": "lock_state"}}
    tool = observation("SPAN", "Lock.run", 2, input=str(ARGUMENTS), output=put, metadata=named)
    assert steps_in(trace_of(generation(ASKED, ANSWER), tool))[1:] == STEPS[1:3]


def test_calls_that_lose_their_ids_where_they_are_repeated_are_the_same() -> None:
    calls: list[Json] = [{"functionCall": {"id": f"f{n}", "name": "lock_state", "args": ARGUMENTS}} for n in range(2)]
    repeated = [{"functionCall": {"name": "lock_state", "args": ARGUMENTS}}] * 2
    results = [{"functionResponse": {"name": "lock_state", "response": state}} for state in ("open", "shut")]
    asked = {"role": "user", "parts": [{"text": ASKED}]}
    got = [asked, {"role": "model", "parts": repeated}, {"role": "user", "parts": results}]
    first = generation([asked], {"role": "model", "parts": calls})
    tools = [
        observation("TOOL", "lock", n, input={}, output={}, metadata={"attributes": {"gen_ai.tool.name": "lock_state", **own}})
        for n, own in ((1, {"gen_ai.tool.call.id": "f0"}), (2, {"gen_ai.tool.call.id": "f1"}))
    ]
    last = generation({"contents": got}, ANSWER, 4)
    late = first | {"endTime": "2026-02-03T08:00:03.500Z"}
    for spans in ([first, last], [first, *tools, last], [late, *tools, last]):
        contents = [content for *_, content in steps_in(trace_of(*spans))]
        assert sorted(contents) == sorted([STEPS[1][2]] * 2 + ["open", "shut", ANSWER])


def test_unknown_messages_around_the_models_do_not_refuse_the_run() -> None:
    state = {"messages": [by("user", ASKED), by("narrator", "It rains.")]}
    model = generation([of_type("human", ASKED), {"type": "remove", "id": "x"}], ANSWER, 1)
    trace = trace_of(observation("CHAIN", "run", 0, input=state, output=state), model)
    assert (trace["task"]["objective"], steps_in(trace)) == (ASKED, STEPS[3:])


def test_block_with_a_name_and_arguments_is_a_call_whatever_its_type() -> None:
    block = {"type": "frobnicate", "id": "c", "name": "lock_state", "args": ARGUMENTS}
    trace = trace_of(generation(ASKED, [by("assistant", [text(THOUGHT), block])]))
    assert steps_in(trace) == STEPS[:2]


def test_a_field_without_a_name_is_no_call() -> None:
    chat = {"messages": [by("user", ASKED), by("assistant", ANSWER)]}
    (trace,) = converted("", chat | {"": {"lock": 7}})
    assert steps_in(trace) == STEPS[3:]
