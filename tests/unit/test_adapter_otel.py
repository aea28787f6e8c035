"""Spans of OpenTelemetry become traces, by the GenAI conventions and by OpenInference, in the protocol's JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import permutations
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.adapters import ConvertedRun, Converter, converter
from kp_scorer.cli.converting import Conversion
from kp_scorer.cli.input import read_files
from kp_scorer.errors import NotConverted, Unfinished

from tests.support.builders import LIMITS
from tests.support.converting import SUPPLIED, converted, converted_and_refused, refused_fields, steps_in, steps_of

Json = dict[str, Any]
TRACE: Final = "5B8EFFF798038103D269B633813FC60C"
START: Final = 1_767_225_600_000_000_000
"""The beginning of 2026, in nanoseconds."""
MS: Final = 1_000_000
FAILED: Final = {"code": 2, "message": "timed out"}


def any_value(value: object) -> Json:
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case list():
            return {"arrayValue": {"values": [any_value(item) for item in value]}}
        case dict():
            return {"kvlistValue": {"values": key_values(value)}}
    raise AssertionError(value)


def key_values(values: Json) -> list[Json]:
    return [{"key": key, "value": any_value(value)} for key, value in values.items()]


def span(name: str, at_ms: int, until_ms: int, attributes: Json, *, parent: str = "", **more: object) -> Json:
    return {
        "traceId": TRACE,
        "spanId": f"{name}@{at_ms}",
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(START + at_ms * MS),
        "endTimeUnixNano": str(START + until_ms * MS),
        "attributes": key_values(attributes),
        **more,
    }


def export(*spans: Json, scope: str = "some.instrumentation", **resource: object) -> Json:
    of_scope = {"scope": {"name": scope, "version": "1.2"}, "spans": list(spans)}
    return {"resourceSpans": [{"resource": {"attributes": key_values(resource)}, "scopeSpans": [of_scope]}]}


def steps(*spans: Json) -> list[tuple[str, ...]]:
    return steps_of("otel", export(*spans))


def kinds(*spans: Json) -> list[str]:
    return [kind for kind, *_ in steps(*spans)]


def text(content: str) -> Json:
    return {"type": "text", "content": content}


def message(role: str, *parts: Json) -> Json:
    return {"role": role, "parts": list(parts)}


def chat(
    at_ms: int, until_ms: int, inputs: Sequence[Json], outputs: Sequence[Json], form: Any = json.dumps, **more: Any
) -> Json:
    messages = {"gen_ai.input.messages": form(inputs), "gen_ai.output.messages": form(outputs)}
    return span("chat some-model", at_ms, until_ms, {"gen_ai.operation.name": "chat"} | messages, **more)


def tool(name: str, at_ms: int, until_ms: int, call_id: str = "", **more: Any) -> Json:
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, "gen_ai.tool.type": "function"}
    attributes |= {"gen_ai.tool.call.id": call_id} if call_id else {}
    return span(f"execute_tool {name}", at_ms, until_ms, attributes | more.pop("attributes", {}), **more)


def response(content: object, call_id: str = "call_1", role: str = "tool", **more: object) -> Json:
    return message(role, {"type": "tool_call_response", "id": call_id, "response": content, **more})


def fed(reader: Converter, *sources: object, line: int = 1) -> list[ConvertedRun | NotConverted]:
    return [result for number, each in enumerate(sources, line) for result in reader.feed(number, each)]


ASKED: Final = message("user", text("How windy is it in Bergen?"))
CALL: Final = {"type": "tool_call", "id": "call_1", "name": "get_wind", "arguments": {"town": "Bergen"}}
CALLED: Final = message("assistant", CALL)
RETURNED: Final = response("14 m/s")
ANSWERED: Final = message("assistant", text("It blows with 14 m/s."))
STEPS: Final = [
    ("tool_call", "get_wind", 'get_wind({"town": "Bergen"})'),
    ("observation", "14 m/s"),
    ("thought", "It blows with 14 m/s."),
]
HISTORY: Final = [ASKED, CALLED, RETURNED]
USED: Final = {"gen_ai.tool.call.arguments": '{"town": "Bergen"}', "gen_ai.tool.call.result": "14 m/s"}
AGAIN: Final = message("assistant", text("Once more."), CALL | {"id": "call_2"})
RECOVERED: Final = [STEPS[0], ("observation", "timed out"), ("error_recovery", "Once more."), *STEPS]
SYSTEM: Final = message("system", text("You know the weather."))
WINDY: Final = [
    chat(0, 10, [SYSTEM, ASKED], [CALLED | {"finish_reason": "tool_call"}]),
    chat(20, 30, [SYSTEM, ASKED, CALLED, RETURNED], [ANSWERED | {"finish_reason": "stop"}]),
]
TRIED_AGAIN: Final = [
    tool("get_wind", 11, 13, "call_1", status=FAILED),
    tool("get_wind", 14, 19, "call_1", attributes={"gen_ai.tool.call.result": "14 m/s"}),
]
UNDATED: Final = SUPPLIED._replace(created_at=None)


def test_span_of_a_tool_adds_its_latency_to_the_call_of_the_model_and_no_step() -> None:
    recorded = {"gen_ai.tool.call.arguments": {"town": "Bergen"}, "gen_ai.tool.call.result": "14 m/s"}
    for fields in (None, {"call_id": "call_1"}, {"call_id": "call_1", "attributes": recorded}, {"attributes": recorded}):
        between = [tool("get_wind", 11, 19, **fields)] if fields else []
        (trace,) = converted("otel", export(WINDY[0], *between, WINDY[1]), supplied=UNDATED)
        assert trace["id"] == f"kp:trace:otel:{TRACE.lower()}"
        assert trace["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"
        assert trace["task"] == {"objective": "How windy is it in Bergen?"}
        assert steps_in(trace) == STEPS
        assert trace["steps"][0]["input"] == {"town": "Bergen"}
        assert trace["steps"][0].get("latency_ms") == (8 if fields else None)
        assert trace["outcome"]["result_summary"] == "It blows with 14 m/s."


def test_thoughts_and_tools_of_the_provider() -> None:
    outputs: list[Json] = [
        {"type": "reasoning", "content": "I search first."},
        {"type": "server_tool_call", "id": "s_1", "name": "web_search", "server_tool_call": {"query": "Bergen wind"}},
        {"type": "server_tool_call_response", "id": "s_1", "server_tool_call_response": {"hits": 3}},
        {"type": "uri", "modality": "image", "uri": "https://example.org/map.png"},
        text("Strong."),
    ]
    assert steps(chat(0, 1, [ASKED], [message("assistant", *outputs)])) == [
        ("thought", "I search first."),
        ("tool_call", "web_search", 'web_search({"query": "Bergen wind"})'),
        ("observation", '{"hits": 3}'),
        ("thought", "Strong."),
    ]


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=3, max_size=3))
def test_spans_may_come_in_any_order_and_on_any_line(order: list[int], cuts: list[int]) -> None:
    root = span("invoke_agent", 0, 40, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "skipper"})
    spans = [root, WINDY[0], tool("get_wind", 10, 20, "call_1"), WINDY[1]]
    spans = [spans[place] for place in order]
    lines = [export(*spans[: cuts[0]]), export(*spans[cuts[0] :])]
    (trace,) = converted("otel", *lines)
    assert steps_in(trace) == STEPS
    assert converted("otel", export(*spans))[0] == trace


EXCEPTION: Final = {"exception.type": "TimeoutError", "exception.message": "timed out"}


@pytest.mark.parametrize(
    "failure",
    [
        {"status": FAILED},
        {"status": {"code": "STATUS_CODE_ERROR", "message": "timed out"}},
        {"attributes": {"error.type": "timeout"}, "status": {"message": "timed out"}},
        {"status": {"code": 2}, "events": [{"name": "exception", "attributes": key_values(EXCEPTION)}]},
    ],
)
def test_tool_that_failed_is_an_error_and_the_next_try_a_recovery(failure: Json) -> None:
    failed, retried = tool("get_wind", 11, 19, "call_1", **failure), tool("get_wind", 31, 39, "call_2", attributes=USED)
    answers = [chat(20, 30, [ASKED, CALLED], [AGAIN]), chat(40, 50, [ASKED, CALLED, AGAIN], [ANSWERED])]
    assert steps(WINDY[0], failed, answers[0], retried, answers[1]) == RECOVERED


def test_tool_retried_under_one_id_is_called_twice_and_a_later_call_is_new() -> None:
    tried_twice = ["tool_call", "observation", "error_recovery", "observation"]
    assert kinds(WINDY[0], *TRIED_AGAIN, WINDY[1]) == [*tried_twice, "thought"]
    after = [chat(20, 30, HISTORY, [CALLED]), chat(40, 50, [*HISTORY, CALLED, RETURNED], [ANSWERED])]
    assert kinds(WINDY[0], *TRIED_AGAIN, *after) == [*tried_twice, "tool_call", "observation", "thought"]


# The second tool may begin, and even end, before the answer in which the model calls it.
@pytest.mark.parametrize("times_ms", [(31, 33), (25, 27), (25, 35), None])
def test_tools_of_ids_that_each_answer_counts_anew_are_several(times_ms: tuple[int, int] | None) -> None:
    again = message("assistant", CALL | {"arguments": {"town": "Voss"}})
    recorded: Json = {"gen_ai.tool.call.result": "2 m/s"}
    if times_ms and times_ms[0] == 25:
        recorded["gen_ai.tool.call.arguments"] = {"town": "Voss"}
    second = [tool("get_wind", *times_ms, "call_1", attributes=recorded)] if times_ms else []
    between = [tool("get_wind", 11, 19, "call_1"), chat(20, 30, HISTORY, [again]), *second]
    assert steps(WINDY[0], *between, chat(40, 50, [*HISTORY, again, response("2 m/s")], [ANSWERED])) == [
        *STEPS[:2],
        ("tool_call", "get_wind", 'get_wind({"town": "Voss"})'),
        ("observation", "2 m/s"),
        STEPS[2],
    ]


def under(parents: Sequence[str], *more: Json) -> list[Json]:
    """Return the spans of ``WINDY``, each with the parent of its place, and more spans."""
    return [*(each | {"parentSpanId": parent} for each, parent in zip(WINDY, parents, strict=True)), *more]


def numbered(name: str) -> list[Json]:
    return [each | {"spanId": f"{name}{number}"} for number, each in enumerate(WINDY)]


USED_TWICE: Final = [
    tool("get_wind", 11, 19, attributes=USED),
    tool("get_wind", 12, 18, attributes=USED) | {"spanId": "inner"},
]
RENAMED: Final = [ASKED, message("assistant", CALL | {"id": "fc_1"}), RETURNED]
OTHERWISE: Final = {"tool.name": "get_wind", "tool.arguments": {"town": "Bergen"}, "output": "14 m/s"}
STALE: Final = {"gen_ai.completion.0.function_call.name": "get_wind", "gen_ai.completion.0.function_call.arguments": "{}"}
UNUSUAL: Final[dict[str, list[Json]]] = {
    "messages are structured": [chat(0, 1, HISTORY, [ANSWERED], form=list)],
    "one instrumentation records within another": [*numbered("outer"), *under(["outer0", "outer1"])],
    "instrumentations record beside each other": [*WINDY, *numbered("beside"), *USED_TWICE],
    "all spans come twice": [*WINDY, *WINDY],
    "a flat form of the messages repeats an earlier call": [
        WINDY[0],
        WINDY[1] | {"attributes": WINDY[1]["attributes"] + key_values(STALE)},
    ],
    "the tool's span has an id of its own": [
        WINDY[0],
        tool("get_wind", 11, 19, "own-1", attributes=USED | {"gen_ai.tool.call.result": '{"result": "14 m/s"}'}),
        chat(20, 30, [ASKED, CALLED, response({"result": "14 m/s"}, "call_0", role="user")], [ANSWERED]),
    ],
    "the conversation gives the call another id": [chat(0, 10, [ASKED], [CALLED]), chat(30, 40, RENAMED, [ANSWERED])],
    "the model's answer with the call is missing": [
        *(chat(0, 10, [ASKED], []), span("get_wind", 11, 12, OTHERWISE), chat(30, 40, HISTORY, [ANSWERED])),
    ],
}


@pytest.mark.parametrize("spans", UNUSUAL.values(), ids=UNUSUAL)
def test_call_and_its_result_are_one_however_spans_record_them(spans: list[Json]) -> None:
    assert steps(*spans) == STEPS


# The following tests use spans by the conventions of OpenInference.


def flat(prefix: str, messages: Sequence[Json]) -> Json:
    return {f"{prefix}.{n}.message.{key}": value for n, each in enumerate(messages) for key, value in each.items()}


def llm(at_ms: int, until_ms: int, inputs: Sequence[Json], outputs: Sequence[Json], **more: Any) -> Json:
    attributes = {"openinference.span.kind": "LLM", "llm.model_name": "some-model"}
    attributes |= flat("llm.input_messages", inputs) | flat("llm.output_messages", outputs)
    return span("ChatCompletion", at_ms, until_ms, attributes, **more)


MULTIPLY: Final = {
    "role": "assistant",
    "tool_calls.0.tool_call.id": "call_7",
    "tool_calls.0.tool_call.function.name": "multiply",
    "tool_calls.0.tool_call.function.arguments": '{"a": 17, "b": 31}',
}
MULTIPLIED: Final = {"role": "tool", "content": "527", "name": "multiply", "tool_call_id": "call_7"}
CALL_OF_MULTIPLY: Final = {"name": "multiply", "arguments": '{"a": 17, "b": 31}'}
SUM: Final = {"role": "user", "content": "What is 17 times 31?"}
PRODUCT: Final = {"role": "assistant", "content": "It is 527."}
ARITHMETIC: Final = [
    ("tool_call", "multiply", 'multiply({"a": 17, "b": 31})'),
    ("observation", "527"),
    ("thought", "It is 527."),
]


def multiply(at_ms: int, until_ms: int) -> Json:
    attributes = {"tool.name": "multiply", "input.value": '{"a": 17, "b": 31}', "output.value": "527"}
    return span("multiply", at_ms, until_ms, attributes | {"openinference.span.kind": "TOOL"})


def without_ids(attributes: Json) -> Json:
    return {key: value for key, value in attributes.items() if not key.endswith(("tool_call.id", "tool_call_id"))}


@pytest.mark.parametrize("of_call", [dict, without_ids], ids=["with ids of calls", "without"])
def test_openinference_spans_are_a_trace(of_call: Callable[[Json], Json]) -> None:
    root = span("agent", 0, 60, {"openinference.span.kind": "AGENT", "input.value": "{...}", "output.value": "It is 527."})
    call, returned = of_call(MULTIPLY), of_call(MULTIPLIED)
    first, last = llm(5, 10, [SUM], [call]), llm(20, 30, [SUM, call, returned], [PRODUCT])
    for spans in ([first, last], [first, multiply(11, 15), last], [root, first, multiply(11, 15), last]):
        (trace,) = converted("otel", export(*spans))
        assert (trace["task"]["objective"], steps_in(trace)) == ("What is 17 times 31?", ARITHMETIC)


def test_the_same_call_twice_stays_two() -> None:
    call, returned = without_ids(MULTIPLY), without_ids(MULTIPLIED)
    inputs = [SUM, call, returned, call, returned]
    spans = [llm(0, 1, inputs[:1], [call]), llm(2, 3, inputs[:3], [call]), llm(4, 5, inputs, [PRODUCT])]
    assert steps(*spans) == [*ARITHMETIC[:2], *ARITHMETIC]


def test_contents_in_parts_and_a_deprecated_function_call() -> None:
    thinking = {
        "role": "assistant",
        "contents.0.message_content.type": "reasoning",
        "contents.0.message_content.text": "I multiply.",
        "contents.1.message_content.type": "tool_use",
        "contents.1.tool_call.id": "call_7",
        "contents.1.tool_call.function.name": "multiply",
        "contents.1.tool_call.function.arguments": '{"a": 17, "b": 31}',
    }
    spans = [llm(0, 1, [SUM], [thinking]), llm(2, 3, [SUM, thinking, MULTIPLIED], [PRODUCT])]
    assert steps(*spans) == [("thought", "I multiply."), *ARITHMETIC]
    legacy = {"role": "assistant", "function_call_name": "multiply", "function_call_arguments_json": '{"a": 17, "b": 31}'}
    returned = {"role": "function", "name": "multiply", "content": "527"}
    assert steps(llm(0, 1, [SUM], [legacy]), llm(2, 3, [SUM, legacy, returned], [PRODUCT])) == ARITHMETIC


def test_a_run_begins_at_the_users_last_message_and_ten_messages_keep_their_order() -> None:
    inputs = [{"role": ("user", "assistant")[n % 2], "content": f"{n}."} for n in range(12)]
    root = span("agent", 0, 9, {"openinference.span.kind": "AGENT", "input.value": json.dumps({"messages": inputs[:1]})})
    for spans in ([], [root | {"attributes": root["attributes"][:1]}]):
        again = [*inputs, SUM, MULTIPLY, MULTIPLIED]
        (trace,) = converted("otel", export(*spans, llm(1, 2, [*inputs, SUM], [MULTIPLY]), llm(3, 4, again, [PRODUCT])))
        assert (trace["task"]["objective"], steps_in(trace)) == ("What is 17 times 31?", ARITHMETIC)
    thoughts = [{"role": "assistant", "content": f"{n}."} for n in range(12)]
    assert steps(llm(0, 1, [SUM, *thoughts], [PRODUCT])) == [*(("thought", f"{n}.") for n in range(12)), ARITHMETIC[2]]


def test_spans_without_messages_supply_question_and_answer() -> None:
    root = span("query", 0, 10, {"openinference.span.kind": "CHAIN", "input.value": "Anybody there?", "output.value": "Yes."})
    retrieved = {"openinference.span.kind": "RETRIEVER", "input.value": "people", "output.value": '["one"]'}
    mute = span("llm", 3, 4, {"openinference.span.kind": "LLM", "input.value": "{}"})
    (trace,) = converted("otel", export(root, span("search", 1, 2, retrieved), mute))
    assert trace["task"]["objective"] == "Anybody there?"
    assert steps_in(trace) == [("tool_call", "search", "search(people)"), ("observation", '["one"]'), ("thought", "Yes.")]


def test_spans_of_the_ai_sdk_are_a_trace() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "What is 17 times 31?"}]}
    call = {"toolCallId": "call_7", "toolName": "multiply", "input": '{"a": 17, "b": 31}'}
    called = {"role": "assistant", "content": [{"type": "tool-call", **call, "input": {"a": 17, "b": 31}}]}
    result = {"type": "tool-result", "toolCallId": "call_7", "toolName": "multiply", "output": {"type": "text", "value": "527"}}
    history = [asked, called, {"role": "tool", "content": [result]}]
    prompt = {"system": "You calculate.", "prompt": "What is 17 times 31?"}
    first = {"ai.prompt.messages": json.dumps([asked]), "ai.response.toolCalls": json.dumps([call])}
    used = {"ai.toolCall.name": "multiply", "ai.toolCall.id": "call_7", "ai.toolCall.args": '{"a": 17, "b": 31}'}
    last = {"ai.prompt.messages": json.dumps(history), "ai.response.text": "It is 527."}
    spans = [
        span("ai.generateText", 0, 60, {"ai.prompt": json.dumps(prompt), "ai.response.text": "It is 527."}),
        span("ai.generateText.doGenerate", 1, 10, first),
        span("ai.toolCall", 11, 15, used | {"ai.toolCall.result": '"527"'}),
        span("ai.generateText.doGenerate", 20, 30, last),
    ]
    (trace,) = converted("otel", export(*spans))
    assert trace["task"]["objective"] == "What is 17 times 31?"
    assert steps_in(trace) == ARITHMETIC
    assert trace["steps"][0]["latency_ms"] == 4


def test_spans_of_openllmetry_are_a_trace() -> None:
    asked = {"gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "What is 17 times 31?"}
    call = {"id": "call_7", "name": "multiply", "arguments": '{"a": 17, "b": 31}'}
    called = {f"tool_calls.0.{key}": value for key, value in call.items()} | {"role": "assistant"}
    returned = {"role": "tool", "content": "527", "tool_call_id": "call_7"}
    first = asked | {f"gen_ai.completion.0.{key}": value for key, value in called.items()}
    last = asked | {f"gen_ai.prompt.1.{key}": value for key, value in called.items()}
    last |= {f"gen_ai.prompt.2.{key}": value for key, value in returned.items()}
    used = {"traceloop.span.kind": "tool", "traceloop.entity.name": "multiply", "traceloop.entity.output": "527"}
    answer = span("openai.chat", 20, 30, last | {"gen_ai.completion.0.content": "It is 527."})
    assert steps(span("openai.chat", 0, 10, first), span("multiply.tool", 11, 15, used), answer) == ARITHMETIC


PLACE: Final = "resourceSpans.0.scopeSpans.0.spans.0"


def unlike(**fields: object) -> Json:
    return export(WINDY[0] | fields)


def asking(messages: str) -> Json:
    return export(span("chat", 0, 1, {"gen_ai.input.messages": messages}))


REFUSED: Final[Mapping[str, Sequence[tuple[object, str | None]]]] = {
    "otel": [
        ([], None),
        (7, "$"),
        ({"spans": []}, "resourceSpans"),
        ({"resourceSpans": {}}, "resourceSpans"),
        (export(5), PLACE),  # type: ignore[arg-type]
        (unlike(traceId=""), f"{PLACE}.traceId"),
        (unlike(startTimeUnixNano=None), f"{PLACE}.startTimeUnixNano"),
        (unlike(startTimeUnixNano="9" * 20), f"{PLACE}.startTimeUnixNano"),
        (unlike(endTimeUnixNano="soon"), f"{PLACE}.endTimeUnixNano"),
        (unlike(attributes=5), f"{PLACE}.attributes"),
        (unlike(attributes=[{"key": "x", "value": {"textValue": ""}}]), f"{PLACE}.attributes.0.value"),
        (unlike(attributes=[{"key": "x", "value": {"intValue": "1e3"}}]), f"{PLACE}.attributes.0.value.intValue"),
        (asking("no JSON"), PLACE),
        (asking('[{"role": "user", "parts": [{}]}]'), PLACE),
        (export(span("", 0, 1, {"gen_ai.operation.name": "execute_tool"})), f"{PLACE}.name"),
        (export(llm(0, 1, [{"role": "narrator"}], [])), PLACE),
        (export(span("GET /", 0, 1, {})), None),
        (export(span("chat", 0, 1, {"gen_ai.operation.name": "chat"})), PLACE),
        (export(chat(0, 1, [ASKED], [])), PLACE),
    ]
}


def test_trace_with_a_broken_span_is_not_converted_in_part() -> None:
    broken = export(WINDY[1] | {"startTimeUnixNano": "x"})
    assert refused_fields("otel", export(WINDY[0]), broken) == [(2, f"{PLACE}.startTimeUnixNano")]


ROOT: Final = span("run", 0, 40, {})
WITHIN: Final = under([ROOT["spanId"]] * 2)


def of_another_run(number: int, at_ms: int) -> Json:
    return export(span("late", at_ms, at_ms + 1, {}) | {"traceId": f"{number:032x}", "spanId": "late"})


def test_run_is_converted_as_soon_as_another_begins_well_after_its_end() -> None:
    reader = Converter(SUPPLIED, LIMITS, "otel")
    assert fed(reader, export(*WITHIN), export(ROOT), of_another_run(1, 9_000)) == []
    (result,) = reader.feed(4, of_another_run(1, 12_000))
    assert isinstance(result, ConvertedRun)
    assert len(result.trace["steps"]) == len(STEPS)
    # Later records of a run that is converted already are refused, with a single error.
    refused = fed(reader, export(WITHIN[0]), export(WITHIN[0]), line=5)
    assert [error.line for error in refused if isinstance(error, NotConverted)] == [5]


def test_run_whose_clock_is_ahead_cuts_no_other_off() -> None:
    reader = Converter(SUPPLIED, LIMITS, "otel")
    ahead = span("late", 0, 1, {}) | {"traceId": "1" * 32, "startTimeUnixNano": str(2**63 - 1)}
    assert fed(reader, export(ROOT), export(ahead), export(*WITHIN)) == []
    (result,) = (result for result in reader.end() if isinstance(result, ConvertedRun))
    assert len(result.trace["steps"]) == len(STEPS)


def test_runs_that_are_open_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "_MOST_OPEN", 2)
    reader = Converter(SUPPLIED, LIMITS, "otel")
    assert list(reader.feed(1, export(*WINDY))) == []
    (trace,) = reader.feed(2, of_another_run(1, 0))
    assert isinstance(trace, ConvertedRun)


def test_resource_and_attributes_of_the_root_are_fields_of_the_record() -> None:
    exported = export(*WINDY, span("run", 0, 40, {"agent.name": "pilot"}), **{"service.name": "weather"})
    paths = {"task_domain": "resource.service.name", "id": "attributes.gen_ai.operation.name"}
    (trace,) = converted("otel", exported, supplied=SUPPLIED._replace(paths=paths))
    assert (trace["metadata"]["task_domain"], trace["id"]) == ("weather", "kp:trace:otel:chat")


def printed_by_python(each: Json) -> str:
    """Return a span as the console exporter of the Python SDK prints it."""
    times = {
        key: datetime.fromtimestamp(int(each[field]) / 1e9, UTC).isoformat().replace("+00:00", "Z")
        for key, field in (("start_time", "startTimeUnixNano"), ("end_time", "endTimeUnixNano"))
    }
    context = {"trace_id": f"0x{TRACE.lower()}", "span_id": f"0x{each['spanId']}", "trace_state": "[]"}
    attributes = {pair["key"]: pair["value"]["stringValue"] for pair in each["attributes"]}
    fields = {"name": each["name"], "context": context, "kind": "SpanKind.INTERNAL", "parent_id": None, **times}
    return json.dumps(fields | {"status": {"status_code": "UNSET"}, "attributes": attributes, "events": []}, indent=4)


def test_spans_on_a_console_are_read(tmp_path: Path) -> None:
    (file := tmp_path / "printed").write_text("\n".join(map(printed_by_python, WINDY)))
    (line,) = read_files([str(file)], LIMITS, Conversion(SUPPLIED, LIMITS))
    assert line.document["id"] == f"kp:trace:otel:{TRACE.lower()}"
    assert steps_in(dict(line.document)) == STEPS


# In each dialect, one exporter's attributes carry the same run: a question, a call, its result, and the answer.


def dialect(kind: str, got: str, put: str, kinds: Sequence[str]) -> list[Json]:
    """Return a run's spans in a dialect: the root, a model that calls a tool, the tool, and a model that answers.

    The attributes of these names hold the kind, the input and the output of each; ``kinds`` are those of an agent, a model and
    a tool.
    """
    asked = [{"role": "user", "content": "What is 17 times 31?"}]
    call = {"id": "call_7", "type": "function", "function": CALL_OF_MULTIPLY}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    returned = {"role": "tool", "tool_call_id": "call_7", "content": "527"}
    contents: list[tuple[str, str, object, object]] = [
        ("answer", kinds[0], {"question": "What is 17 times 31?"}, "It is 527."),
        ("ChatModel", kinds[1], {"messages": asked}, {"choices": [{"message": called}]}),
        ("multiply", kinds[2], {"args": [], "kwargs": {"a": 17, "b": 31}}, "527"),
        ("ChatModel", kinds[1], {"messages": [*asked, called, returned]}, {"choices": [{"message": PRODUCT}]}),
    ]
    spans = []
    for number, (name, own_kind, question, answer) in enumerate(contents):
        attributes = ({kind: own_kind} if own_kind else {}) | {got: json.dumps(question), put: json.dumps(answer)}
        times = (10 * number, 10 * number + 9) if number else (0, 100)
        spans.append(span(name, *times, attributes, parent="answer@0" if number else ""))
    return spans


@pytest.mark.parametrize(
    ("kind", "got", "put", "kinds"),
    [
        (
            *("langfuse.observation.type", "langfuse.observation.input", "langfuse.observation.output"),
            ("span", "generation", "tool"),
        ),
        ("mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs", ('"AGENT"', '"CHAT_MODEL"', '"TOOL"')),
        ("gen_ai.operation.name", "gen_ai.prompt", "gen_ai.completion", ("chain", "chat", "execute_tool")),
        ("some.span.type", "some.step.input", "some.step.output", ("agent_run", "model_step", "tool_call")),
        ("genkit:metadata:subtype", "genkit:input", "genkit:output", ("flow", "model", "tool")),
        # Only a call by a model shows that the span of this name is a tool's.
        ("some.kind", "gcp.vertex.agent.llm_request", "gcp.vertex.agent.llm_response", ("", "", "")),
    ],
    ids=["langfuse", "mlflow", "whole prompts", "unknown prefixes", "colons", "no kinds"],
)
def test_attributes_mean_what_the_ends_of_their_names_say(kind: str, got: str, put: str, kinds: Sequence[str]) -> None:
    spans = dialect(kind, got, put, kinds)
    if not kinds[1]:
        for each in spans[1::2]:
            each["attributes"] += key_values({"gen_ai.request.model": "some-model"})
    (trace,) = converted("otel", export(*spans))
    assert (trace["task"]["objective"], steps_in(trace)) == ("What is 17 times 31?", ARITHMETIC)
    assert trace["steps"][0]["input"] == {"a": 17, "b": 31}
    assert trace["steps"][0]["latency_ms"] == 9


def event(name: str, **attributes: object) -> Json:
    return {"name": name, "attributes": key_values(attributes)}


def test_messages_in_events_are_read() -> None:
    asked = event("gen_ai.user.message", content='[{"text": "What is 17 times 31?"}]')
    called = '[{"toolUse": {"toolUseId": "call_7", "name": "multiply", "input": {"a": 17, "b": 31}}}]'
    returned = '[{"toolResult": {"toolUseId": "call_7", "content": [{"text": "527"}]}}]'
    history = [asked, event("gen_ai.assistant.message", content=called), event("gen_ai.tool.message", content=returned)]
    chats = {"gen_ai.operation.name": "chat"}
    used = [event("gen_ai.tool.message", content='{"a": 17, "b": 31}'), event("gen_ai.choice", message='[{"text": "527"}]')]
    spans = [
        span("chat", 0, 10, chats, events=[asked, event("gen_ai.choice", message=called)]),
        tool("multiply", 11, 15, "call_7", events=used),
        span("chat", 20, 30, chats, events=[*history, event("gen_ai.choice", message='{"content": "It is 527."}')]),
    ]
    assert steps(*spans) == ARITHMETIC
    details = {"gen_ai.input.messages": json.dumps([ASKED]), "gen_ai.output.messages": json.dumps([ANSWERED])}
    detailed = span("chat", 0, 10, chats, events=[event("gen_ai.client.inference.operation.details", **details)])
    assert steps(detailed) == [STEPS[2]]
    contents = {"gen_ai.user.message": {"content": "Why?"}, "gen_ai.choice": {"message": {"content": "So."}}}
    packed = [event(name, **{"gen_ai.event.content": json.dumps(content)}) for name, content in contents.items()]
    assert steps(span("chat", 0, 10, chats, events=packed)) == [("thought", "So.")]
    reasoning = {
        "event.name": "gen_ai.unknown",
        "data": {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    }
    listed = [{"event.name": "gen_ai.user.message", "content": "Why?"}, reasoning]
    listed += [{"event.name": "gen_ai.assistant.message", "role": "assistant", "content": "So."}]
    assert steps(span("chat", 0, 10, chats | {"events": json.dumps(listed)})) == [("thought", "Hm."), ("thought", "So.")]


def test_events_in_logs_belong_to_their_spans() -> None:
    def log(name: str, at_ms: int, body: object) -> Json:
        ids = {"traceId": TRACE, "spanId": "chat@0", "timeUnixNano": str(START + at_ms * MS)}
        return ids | {"eventName": name, "body": any_value(body)}

    logs = [log("gen_ai.user.message", 1, {"content": "Why?"}), log("gen_ai.choice", 2, '{"message": {"content": "So."}}')]
    exported = {"resourceLogs": [{"scopeLogs": [{"logRecords": logs}]}]}
    (trace,) = converted("otel", exported, export(span("chat", 0, 10, {"gen_ai.operation.name": "chat"})))
    assert (trace["task"]["objective"], steps_in(trace)) == ("Why?", [("thought", "So.")])


def test_answer_is_before_the_tools_that_begin_during_the_span_of_its_model() -> None:
    first = message("assistant", text("I look."), CALL)
    failed = tool("get_wind", 5, 8, "call_1", status=FAILED, parent="chat some-model@0")
    spans = [chat(0, 10, [ASKED], [first]), failed, chat(11, 20, [ASKED, first], [AGAIN])]
    # Some exporters record only whole milliseconds, so that this tool seems to begin before its model has answered.
    third = tool("get_wind", 11, 12, "call_2", attributes=USED) | {"startTimeUnixNano": str(START + 11 * MS - 400_000)}
    assert steps(*spans, third, chat(30, 40, [ASKED, first, AGAIN], [ANSWERED])) == [("thought", "I look."), *RECOVERED]


def test_words_that_only_the_next_prompt_has_are_before_their_call() -> None:
    asked_for = {"gen_ai.tool.call.arguments": USED["gen_ai.tool.call.arguments"]}
    first = message("assistant", text("I look."), CALL)
    history = [ASKED, first, response("timed out")]
    failed, retried = (
        tool("get_wind", 11, 12, attributes=asked_for, status=FAILED),
        tool("get_wind", 21, 22, attributes=asked_for),
    )
    spans = [chat(0, 10, [ASKED], []), failed, chat(13, 14, history, []), retried]
    answer = chat(30, 40, [*history, AGAIN, response("14 m/s", "call_2")], [ANSWERED])
    assert steps(*spans, answer) == [("thought", "I look."), *RECOVERED]
    # Gemini's calls have no ids. A tool's span that has an id may begin before the span of its model ends.
    unnumbered = message("assistant", text("I look."), {key: value for key, value in CALL.items() if key != "id"})
    within = [chat(0, 10, [ASKED], [unnumbered]), tool("get_wind", 8, 9, "own-1", attributes=USED)]
    assert steps(*within, chat(11, 20, [ASKED, unnumbered], [ANSWERED])) == [("thought", "I look."), *STEPS]


def test_steps_of_a_workflow_without_models_have_the_question_and_the_answer() -> None:
    asked = {"role": "user", "blocks": [{"block_type": "text", "text": "How windy is it in Bergen?"}]}
    answer = {"role": "assistant", "content": "It blows with 14 m/s."}
    used = {"tool_name": "get_wind", "tool_id": "1", "tool_output": {"blocks": [{"type": "text", "text": "14 m/s"}]}}
    outputs = (
        {"input": [asked], "agent": "a"},
        used,
        {"result": {"response": answer, "tool_calls": [{"tool_name": "get_wind"}]}},
    )
    tasks = [
        span("task", 2 * number, 2 * number + 1, {"traceloop.entity.output": json.dumps(output)}, parent="w@0")
        for number, output in enumerate(outputs, 1)
    ]
    tasks[1]["attributes"] += key_values({"tool.name": "get_wind", "tool.arguments": {"town": "Bergen"}})
    assert steps(span("w", 0, 90, {"traceloop.span.kind": "workflow"}), *tasks) == STEPS


def test_tool_whose_span_has_another_id_and_no_arguments_is_the_one_that_the_model_called() -> None:
    twice = message("assistant", CALL, CALL | {"id": "call_2", "arguments": {"town": "Oslo"}})
    results = [{"type": "tool_call_response", "id": f"call_{number}", "response": f"{number} m/s"} for number in (1, 2)]
    tools = [tool("get_wind", 11, 19, "adk-7"), tool("get_wind", 12, 18, "adk-8")]
    spans = [chat(0, 10, [ASKED], [twice]), *tools, chat(20, 30, [ASKED, twice, message("tool", *results)], [ANSWERED])]
    assert steps(*spans) == [
        STEPS[0],
        ("tool_call", "get_wind", 'get_wind({"town": "Oslo"})'),
        ("observation", "1 m/s"),
        ("observation", "2 m/s"),
        STEPS[2],
    ]


def test_wrapped_values_are_unwrapped() -> None:
    own = {"content": "Error: no wind", "type": "tool", "tool_call_id": "call_1"}
    constructor = {"lc": 1, "type": "constructor", "id": ["langchain", "messages", "ToolMessage"], "kwargs": own}
    beside = {"tags": ["seq:step:1"], "kwargs": {"name": "get_wind"}}
    recorded = {
        "gen_ai.tool.call.arguments": json.dumps({"input_str": "{}", "inputs": {"town": "Bergen"}, "metadata": {}} | beside),
        "gen_ai.tool.call.result": json.dumps({"output": constructor} | beside),
    }
    # A second instrumentation records the same call and the same answer.
    plain = USED | {"gen_ai.tool.call.result": "Error: no wind"}
    tools = [tool("get_wind", 11, 19, attributes=recorded), tool("get_wind", 12, 18, "call_1", attributes=plain)]
    answer = chat(20, 30, [ASKED, CALLED, response("Error: no wind")], [ANSWERED])
    beside_it = chat(21, 29, [ASKED, CALLED, response("Error: no wind", name="get_wind")], [ANSWERED])
    assert steps(WINDY[0], *tools, answer, beside_it) == [STEPS[0], ("observation", "Error: no wind"), STEPS[2]]


def test_only_argument_by_position_is_the_arguments_if_it_is_an_object() -> None:
    for positional, expected in (({"town": "Bergen"}, {"town": "Bergen"}), ("Bergen", {"args": ["Bergen"], "kwargs": {}})):
        recorded = {"gen_ai.tool.call.arguments": json.dumps({"args": [positional], "kwargs": {}})}
        (trace,) = converted("otel", export(chat(0, 10, [ASKED], []), tool("get_wind", 11, 19, attributes=recorded), WINDY[1]))
        assert trace["steps"][0]["input"] == expected


def test_result_without_an_id_in_a_list_without_its_call_is_that_of_the_open_call() -> None:
    returned = {"role": "tool", "content": "527"}
    assert steps(llm(0, 1, [SUM], [MULTIPLY]), llm(2, 3, [returned], [PRODUCT])) == ARITHMETIC


def test_argument_with_the_name_of_a_wrapping_stays() -> None:
    recorded = {"gen_ai.tool.call.arguments": '{"input": "Bergen"}', "gen_ai.tool.call.result": "14 m/s"}
    (trace,) = converted("otel", export(chat(0, 10, [ASKED], []), tool("get_wind", 11, 19, attributes=recorded)))
    assert trace["steps"][0]["input"] == {"input": "Bergen"}


def test_output_of_a_node_that_ends_before_the_last_call_is_no_answer() -> None:
    root = span("LangGraph", 0, 40, {"openinference.span.kind": "CHAIN"}, status=FAILED)
    update = json.dumps([{"graph": None, "update": {"messages": [CALLED]}}])
    node = span("model", 0, 10, {"openinference.span.kind": "CHAIN", "output.value": update}, parent=root["spanId"])
    spans = [root, node, WINDY[0], tool("get_wind", 11, 19, "call_1", parent=root["spanId"], status=FAILED)]
    assert steps(*spans) == [STEPS[0], ("observation", "timed out")]


def test_error_of_an_inner_span_is_that_of_the_tool() -> None:
    outer = tool("get_wind", 11, 19, attributes={"gen_ai.tool.call.result": "no wind"}, status={"code": 1})
    inner = tool("get_wind", 12, 18, "call_1", parent=outer["spanId"], status=FAILED)
    again = message("assistant", CALL | {"id": "call_2"})
    answer = chat(20, 30, [ASKED, CALLED, response("no wind")], [again])
    assert kinds(WINDY[0], outer, inner, answer) == ["tool_call", "observation", "error_recovery"]


def test_handoff_is_the_call_by_which_the_model_asks_for_it() -> None:
    call = message("assistant", {"type": "tool_call", "id": "call_1", "name": "transfer_to_ship_pilot", "arguments": {}})
    handoff = span("handoff to Ship Pilot", 11, 12, {"openinference.span.kind": "TOOL"})
    assert kinds(chat(0, 10, [ASKED], [call]), handoff, chat(20, 30, [ASKED, call], [ANSWERED])) == ["tool_call", "thought"]


@pytest.mark.parametrize(
    ("ended", "status", "success"),
    [
        *(("workflow@0", FAILED, False), ("skipper@1", FAILED, False)),
        *(("chat some-model@20", FAILED, True), ("scout@0", FAILED, True)),
        *(("skipper@1", {}, True), ("skipper@1", {"code": 1}, True), ("skipper@1", None, True)),
    ],
)
def test_run_whose_root_or_agent_failed_did_not_succeed(ended: str, status: Json | None, success: bool) -> None:
    agent = {"openinference.span.kind": "AGENT"}
    root, scout = span("workflow", 0, 50, agent, status={"code": 1}), span("scout", 0, 1, agent, parent="workflow@0")
    skipper = span("skipper", 1, 40, agent, parent="workflow@0")
    spans = under(["skipper@1"] * 2, root, scout, skipper)
    (trace,) = converted("otel", export(*(each | ({"status": status} if each["spanId"] == ended else {}) for each in spans)))
    assert trace["metadata"]["success"] is success


def test_prompts_and_results_that_a_program_repeats_are_not_observations() -> None:
    root = span("agent", 0, 90, {"openinference.span.kind": "AGENT", "input.value": "What is 17 times 31?"})
    template = {"role": "user", "content": "Question: What is 17 times 31?\nSteps so far: {}"}
    again = template | {"content": template["content"].format("multiply gave 527")}
    spans = [llm(1, 10, [template], [MULTIPLY]), multiply(11, 15), llm(20, 30, [again], [PRODUCT])]
    assert steps(root, *spans) == ARITHMETIC
    retold = {"role": "assistant", "content": "Calling tools: [{'id': 'call_7', 'name': 'multiply'}]"}
    for role in ("user", "tool"):
        observed = {"role": role, "content": "Observation: 527"}
        assert (
            steps(llm(0, 10, [SUM], [MULTIPLY]), multiply(11, 15), llm(20, 30, [SUM, retold, observed], [PRODUCT]))
            == ARITHMETIC
        )


def test_conversation_of_an_agent_without_models_is_the_run() -> None:
    talk = [SUM, {"role": "assistant", "content": "", "tool_calls": [{"id": "call_7", "function": CALL_OF_MULTIPLY}]}]
    talk += [{"role": "tool", "tool_call_id": "call_7", "content": "527"}, PRODUCT]
    printed = "ChatMessage(_role=<ChatRole.USER: 'user'>, _content=[TextContent(text='What is 17 times 31?')], _name=None)"
    for asked in ({"messages": [SUM]}, {"data": {"messages": [printed]}}):
        values = {"input.value": json.dumps(asked), "output.value": json.dumps({"messages": talk})}
        (trace,) = converted("otel", export(span("run", 0, 9, values | {"openinference.span.kind": "CHAIN"})))
        assert (trace["task"]["objective"], steps_in(trace)) == ("What is 17 times 31?", ARITHMETIC)


ODD: Final = [chat(0, 1, [message("user", {"type": ""}), *HISTORY], [ANSWERED])]


def test_odd_message_is_left_out_and_counted() -> None:
    reader = Converter(SUPPLIED, LIMITS, "otel")
    odd: Json = {"role": "narrator", "content": "Meanwhile"}
    results = [*fed(reader, export(llm(0, 1, [odd, SUM], [PRODUCT]))), *reader.end()]
    results += [*fed(reader, export(ODD[0] | {"traceId": "2" * 32})), *reader.end()]
    assert [steps_in(each.trace) for each in results if isinstance(each, ConvertedRun)] == [ARITHMETIC[2:], STEPS]
    assert reader.counts["skipped"] == 2


def test_calls_that_continue_each_other_are_one_run_though_no_span_is_around_them() -> None:
    lone = [each | {"traceId": f"{number}" * 32} for number, each in enumerate(WINDY, 1)]
    (trace,) = converted("otel", export(*lone))
    assert (trace["id"], steps_in(trace)) == (f"kp:trace:otel:{'2' * 32}", STEPS)
    traces, (unfinished,) = converted_and_refused("otel", [export(lone[0])])
    assert (traces, type(unfinished)) == ([], Unfinished)
    more = message("user", text("And in Voss?"))
    # Another instrumentation may record the same run around these spans, under a trace id of its own.
    for sources in permutations([export(*lone), export(ROOT, *WITHIN)]):
        (trace,) = converted("otel", *sources)
        assert (trace["id"], steps_in(trace)) == (f"kp:trace:otel:{TRACE.lower()}", STEPS)
    # If several runs of a task begin alike, each different end makes a run.
    second_end = chat(25, 35, [SYSTEM, *HISTORY], [message("assistant", text("Windy."))])
    alike = [lone[0], lone[0] | {"traceId": "3" * 32}, lone[1], second_end | {"traceId": "4" * 32}]
    traces, refused = converted_and_refused("otel", [export(*alike)])
    assert ([each["outcome"]["result_summary"] for each in traces], refused) == ([STEPS[-1][1], "Windy."], [])
    next_turn = chat(40, 50, [*HISTORY, ANSWERED, more], [message("assistant", text("Calm."))])
    traces = converted("otel", export(*lone, next_turn | {"traceId": "3" * 32}))
    assert [each["task"]["objective"] for each in traces] == ["How windy is it in Bergen?", "And in Voss?"]


@pytest.mark.parametrize("resumed", ["null", '{"graph": null, "resume": "yes"}'], ids=["before a tool", "within a tool"])
def test_a_run_that_waits_for_a_person_and_its_continuation_are_one_run(resumed: str) -> None:
    def invoked(number: int, put: str, *spans: Json) -> Json:
        """Return one of the two traces that LangGraph records: until the run waits for a person, and after it goes on."""
        attributes = {"span.kind": "AGENT", "input.value": put} | ({} if waiting else {"metadata": '{"thread_id": "t-7"}'})
        within = [each | {"parentSpanId": "LangGraph@0"} for each in spans]
        return export(*(each | {"traceId": f"{number}" * 32} for each in (span("LangGraph", 0, 90, attributes), *within)))

    # The tool's error is the interrupt, which is no result.
    raised = {"code": 2, "message": "GraphInterrupt((Interrupt(value='Shall I?'),))"}
    waiting = [] if resumed == "null" else [tool("get_wind", 11, 12, "call_1", status=raised)]
    began = invoked(1, "How windy is it in Bergen?", WINDY[0], *waiting)
    # This span has the arguments in another form than the model's call, and lacks the id of the call.
    went_on = tool("get_wind", 11, 12, attributes={"input.value": "Bergen", "output.value": "14 m/s"})
    ended = invoked(2, resumed, went_on, chat(20, 30, HISTORY, [ANSWERED]))
    (trace,) = converted("otel", began, ended)
    assert (trace["task"]["objective"], steps_in(trace)) == ("How windy is it in Bergen?", STEPS)
    _, (unfinished,) = converted_and_refused("otel", [began])
    assert isinstance(unfinished, Unfinished)
    assert unfinished.is_part


def test_runs_of_no_agent_are_left_out_and_one_without_content_names_the_switch() -> None:
    reader = Converter(SUPPLIED, LIMITS, "otel")
    health: list[object] = [of_another_run(number, 0) for number in (1, 2)]
    created = export(span("create_agent", 0, 1, {"gen_ai.operation.name": "create_agent"}) | {"traceId": "3" * 32})
    redacted = span("chat", 0, 1, {"gen_ai.operation.name": "chat", "input.value": "__REDACTED__"})
    mute = export(redacted, **{"service.name": "weather"})
    again = json.loads(json.dumps(mute).replace(TRACE, "4" * 32))
    assert fed(reader, *health, created, mute, again) == []
    (refused,) = reader.end()
    assert (reader.counts["left_out"], reader.counts["mute"]) == (3, 1)
    assert isinstance(refused, NotConverted)
    for word in ("weather", "some.instrumentation", "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"):
        assert word in refused.problems[0].expected


@pytest.mark.parametrize(
    ("scope", "framework"),
    [
        ("openinference.instrumentation.langchain", "langchain"),
        *((f"opentelemetry.instrumentation.openai{version}", "openai") for version in ("_v2", ".v1")),
        *(("@mastra/otel-exporter", "mastra"), ("strands.telemetry.tracer", "strands"), ("gcp.vertex.agent", "google-adk")),
        *(("gen_ai", "ai-sdk"), ("langfuse-sdk", "langfuse"), ("pydantic-ai", "pydantic-ai"), ("", None)),
    ],
)
def test_framework_is_in_the_name_of_the_scope(scope: str, framework: str | None) -> None:
    (trace,) = converted("otel", export(*WINDY, scope=scope))
    assert trace["metadata"].get("framework") == framework


def test_framework_may_be_that_of_spans_of_no_kind() -> None:
    state = json.dumps([{"role": "user", "content": "How windy is it?"}, {"role": "assistant", "content": "Calm."}])
    run = span("Pipeline.run", 0, 9, {"input.value": "How windy is it?", "output.value": state})
    (trace,) = converted("otel", export(run, scope="openinference.instrumentation.haystack"))
    assert trace["metadata"]["framework"] == "haystack"


def test_run_waits_for_the_spans_that_others_show_to_exist() -> None:
    reader = Converter(SUPPLIED, LIMITS, "otel")
    root, job = span("POST /ask", 0, 1, {}), span("job", 0, 90_000, {}, parent="POST /ask@0")
    within = export(*under(["job@0"] * 2))
    assert fed(reader, export(root), of_another_run(1, 30_000), within, of_another_run(2, 60_000), export(job)) == []
    (converted_run,) = reader.feed(6, of_another_run(3, 110_000))
    assert isinstance(converted_run, ConvertedRun)
    assert steps_in(converted_run.trace) == STEPS


def test_answers_of_tempo_jaeger_and_zipkin_are_read() -> None:
    asked, answered = json.dumps([ASKED]), json.dumps([ANSWERED])
    tags = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": asked, "gen_ai.output.messages": answered}
    listed = [{"key": key, "type": "string", "value": value} for key, value in tags.items()]
    times = {"startTime": START // 1_000, "duration": 5}
    jaeger = {"traceID": TRACE, "spanID": "1", "operationName": "chat", "references": [], "tags": listed, **times}
    zipkin = {"traceId": TRACE, "id": "1", "name": "chat", "timestamp": START // 1_000, "duration": 5, "tags": tags}
    (chatted,) = export(chat(0, 1, [ASKED], [ANSWERED]))["resourceSpans"]
    in_base64 = {"traceId": "W47/+AMBYdJpuXM9b8YMgQ==", "spanId": "AbCdEfGhIjA="}
    named = {"traceID": TRACE, "spans": [jaeger], "processes": {"p1": {"serviceName": "x", "tags": []}}}
    sources: list[object] = [{"batches": [chatted]}, {"trace": {"resourceSpans": [chatted]}}, {"data": [named]}, [zipkin]]
    sources.append(export(chat(0, 1, [ASKED], [ANSWERED]) | in_base64))
    for source in sources:
        (trace,) = converted("", source, supplied=UNDATED)
        assert steps_in(trace) == [STEPS[2]]
        assert trace["metadata"]["created_at"] == "2026-01-01T00:00:00+00:00"
        assert trace["id"] in (f"kp:trace:otel:{TRACE.lower()}", f"kp:trace:otel:{in_base64['traceId']}")


EXAMPLES: Final[dict[str, object]] = {"otel": export(*WINDY)}
