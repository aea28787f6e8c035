"""Exports of Langfuse become traces: whole traces, downloads, rows of observations."""

import json
import re
from collections import Counter
from typing import Any, Final

import pytest

from tests.support.converting import SUPPLIED, converted, converted_and_refused, steps_in, steps_of
from tests.support.paths import EXPORTS
from tests.unit.test_adapter_openai import assistant, call, result, user

Json = dict[str, Any]
UNDATED: Final = SUPPLIED._replace(created_at=None)


def observation(kind: str, name: str, second: int, **more: object) -> Json:
    return {
        "id": f"{name}-{second}",
        "traceId": "tr-1",
        "type": kind,
        "name": name,
        "startTime": f"2026-02-03T08:00:{second:02}.250Z",
        "endTime": f"2026-02-03T08:00:{second + 1:02}.000Z",
        "level": "DEFAULT",
        "statusMessage": None,
        "parentObservationId": None,
        **more,
    }


ASKED: Final = user("Which berths are free?")
CALLED: Final = assistant(None, call("call_1", "berths", '{"pier": "B"}'))
RETURNED: Final = result("call_1", "B4, B9")
FREE: Final = "B4 and B9 are free."
OBSERVATIONS: Final = [
    observation("AGENT", "harbour-master", 0, input={"kwargs": {}}, output=FREE),
    observation("GENERATION", "plan", 1, input=[ASKED], output=CALLED, model="some-model", usage={"total": 90}),
    observation("TOOL", "berths", 3, input={"pier": "B"}, output="B4, B9"),
    observation("GENERATION", "answer", 5, input={"messages": [ASKED, CALLED, RETURNED]}, output=assistant(FREE)),
]
TRACE: Final = {
    "id": "tr-1",
    "timestamp": "2026-02-03T08:00:00.000Z",
    "name": "harbour",
    "input": "Which berths are free?",
    "output": FREE,
    "tags": [],
    "metadata": {"release": "r7"},
}
EXPORTED_TRACE: Final = TRACE | {"observations": OBSERVATIONS, "scores": []}
STEPS: Final = [("tool_call", "berths", 'berths({"pier": "B"})'), ("observation", "B4, B9"), ("thought", FREE)]


def in_store(value: object) -> str:
    """Return a value as Langfuse stores it: as JSON unless it is a text."""
    return value if isinstance(value, str) else json.dumps(value)


def test_all_forms_of_export_give_the_same_trace() -> None:
    texts = [each | {key: in_store(each[key]) for key in ("input", "output")} for each in OBSERVATIONS]
    rows = [
        {re.sub("[A-Z]", lambda capital: f"_{capital[0].lower()}", key): value for key, value in each.items()} for each in texts
    ]
    with_the_trace = (
        [EXPORTED_TRACE],
        [{"trace": TRACE, "observations": OBSERVATIONS, "scores": []}],
        [[EXPORTED_TRACE]],
        [{"data": [EXPORTED_TRACE], "meta": {"page": 1}}],
    )
    for sources in (
        *with_the_trace,
        [{"data": OBSERVATIONS, "meta": {"cursor": None}}],
        [OBSERVATIONS],
        OBSERVATIONS,
        list(reversed(OBSERVATIONS)),
        texts,
        [row | {"start_time": row["start_time"].replace("T", " ").rstrip("Z")} for row in rows],
    ):
        (trace,) = converted("langfuse", *sources, supplied=UNDATED)
        assert (trace["task"], steps_in(trace)) == ({"objective": "Which berths are free?"}, STEPS)
        assert trace["id"] == "kp:trace:langfuse:tr-1"
        # Without a record of the trace itself, the time is that of the first observation.
        began_at = "2026-02-03T08:00:00" + ("" if sources in with_the_trace else ".250000") + "+00:00"
        assert trace["metadata"]["created_at"] == began_at
        assert (trace["steps"][0]["input"], trace["steps"][0]["latency_ms"]) == ({"pier": "B"}, 750)
        assert trace["outcome"]["result_summary"] == FREE


def test_span_that_a_model_called_by_its_name_is_a_tool() -> None:
    spans = [each | ({"type": "SPAN"} if each["name"] == "berths" else {}) for each in OBSERVATIONS]
    assert steps_of("langfuse", [*spans, observation("SPAN", "parse-answer", 7, input="x", output="y")]) == STEPS


def test_error_and_event_are_observations() -> None:
    again = CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": "call_2"}]}
    spans = [
        OBSERVATIONS[1],
        OBSERVATIONS[2] | {"level": "ERROR", "output": None, "statusMessage": "pier B does not answer"},
        observation("GENERATION", "plan", 5, input=[ASKED], output=again),
        observation("EVENT", "gauge", 6, input={"level": "high"}, endTime=None),
        observation("RETRIEVER", "berths", 7, input={"pier": "B"}, output=["B4"]),
        observation("GENERATION", "answer", 9, input="A prompt of the program", output=FREE),
    ]
    assert steps_of("langfuse", spans) == [
        STEPS[0],
        ("observation", "pier B does not answer"),
        ("error_recovery", "berths", 'berths({"pier": "B"})'),
        ("observation", '{"level": "high"}'),
        ("observation", '["B4"]'),
        ("thought", FREE),
    ]


def test_failed_model_is_no_step_and_a_failed_only_root_is_no_success() -> None:
    failed = observation("GENERATION", "plan", 1, input=[ASKED], level="ERROR", statusMessage="rate limit", output=None)
    root = observation("AGENT", "harbour-master", 0, input="Which berths are free?", level="ERROR")
    inner = [each | {"parentObservationId": root["id"]} for each in (failed, *OBSERVATIONS[1:])]
    (trace,) = converted("langfuse", [root, *inner])
    assert steps_in(trace) == STEPS
    assert trace["metadata"]["success"] is False
    (trace,) = converted("langfuse", [root, *OBSERVATIONS[1:]])
    assert trace["metadata"]["success"] is True


def numbered(n: int) -> Json:
    return assistant(None, call("call_0", "sound", f'{{"buoy": {n}}}'))


def depth(text: str) -> Json:
    return result("call_0", text)


def generations(*turns: tuple[list[Json], object]) -> list[Json]:
    return [
        observation("GENERATION", "plan", second, input=inputs, output=outputs)
        for second, (inputs, outputs) in enumerate(turns)
    ]


def steps(*turns: tuple[list[Json], object]) -> list[tuple[str, ...]]:
    return steps_of("langfuse", generations(*turns))


SOUNDED: Final = [
    ("tool_call", "sound", 'sound({"buoy": 1})'),
    ("observation", "3 m"),
    ("tool_call", "sound", 'sound({"buoy": 2})'),
    ("observation", "5 m"),
    ("thought", FREE),
]
HISTORY: Final = [ASKED, numbered(1), depth("3 m"), numbered(2), depth("5 m")]
REPEATED: Final = [ASKED, numbered(1), depth("3 m"), numbered(1), depth("2 m"), numbered(1), depth("1 m")]
REPEATING: Final = [(REPEATED[:at], REPEATED[at]) for at in (1, 3, 5)]
PILOT: Final = assistant(None, call("call_0", "pilot", "{}"))
QUESTION: Final = user("How deep is it?")
SOUNDED_THRICE: Final = [step for text in ("3 m", "2 m", "1 m") for step in (SOUNDED[0], ("observation", text))]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([(HISTORY[:1], HISTORY[1]), (HISTORY[:3], HISTORY[3]), (HISTORY, FREE)], SOUNDED),
        ([(HISTORY[:3], None), (HISTORY, FREE)], SOUNDED),
        ([(HISTORY, FREE)], SOUNDED),
        ([(HISTORY[:1], HISTORY[1]), (HISTORY[:3], HISTORY[3]), ([ASKED, *HISTORY[3:]], FREE)], SOUNDED),
        ([(HISTORY[:1], numbered(1)), ([ASKED, numbered(9), depth("3 m")], FREE)], [*SOUNDED[:2], SOUNDED[4]]),
        ([([ASKED, depth("3 m")], numbered(2)), ([ASKED, *HISTORY[2:]], FREE)], SOUNDED[1:]),
        ([*REPEATING, (REPEATED, FREE)], [*SOUNDED_THRICE, SOUNDED[4]]),
        ([*REPEATING, ([ASKED, *REPEATED[5:]], FREE)], [*SOUNDED_THRICE, SOUNDED[4]]),
        (
            [
                ([ASKED], PILOT),
                ([QUESTION], numbered(1)),
                ([QUESTION, numbered(1), depth("3 m")], "Three metres."),
                ([ASKED, PILOT, depth("Three metres, says the pilot.")], FREE),
            ],
            [
                *(("tool_call", "pilot", "pilot({})"), *SOUNDED[:2]),
                *(("thought", "Three metres."), ("observation", "Three metres, says the pilot."), SOUNDED[4]),
            ],
        ),
    ],
    ids=[
        *("each time whole", "answers unrecorded", "only the last", "without what came first"),
        *("a call whose arguments are shown in other words is one", "a result without its call counts once"),
        *("as often as models output them", "as often as models output them, of which the last is shown"),
        "an agent that a tool asks counts as the asking one does",
    ],
)
def test_ids_that_each_answer_counts_anew_are_several_calls(turns: Any, expected: list[tuple[str, ...]]) -> None:
    assert steps(*turns) == expected


@pytest.mark.parametrize(
    ("content", "asked"),
    [
        ({"role": "admin", "berth": "B4"}, None),
        ({"role": "user", "name": "Ann"}, None),
        ({"role": "user", "content": {"berth": "B4"}}, None),
        ([{"role": "admin"}], None),
        ({"messages": [{"role": "admin"}]}, None),
        (ASKED, "Which berths are free?"),
        ({"messages": [ASKED]}, "Which berths are free?"),
    ],
)
def test_input_of_a_span_and_of_a_trace_is_a_message_only_in_the_form_of_one(content: object, asked: str | None) -> None:
    for source in ([observation("SPAN", "book", 0, input=content, output=FREE)], TRACE | {"input": content}):
        traces, refused = converted_and_refused("langfuse", [source])
        assert [(each["task"]["objective"], steps_in(each)) for each in traces] == [(asked, [("thought", FREE)])] * bool(asked)
        # Users do not speak JSON, so an object that is not a message cannot be the question.
        assert len(refused) == (not asked)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"content": {"berth": "B4"}}, '{"content": {"berth": "B4"}}'),
        ({"role": "admin", "content": "B4"}, '{"content": "B4", "role": "admin"}'),
        ([{"role": "admin"}], '[{"role": "admin"}]'),
        ({"content": "B4"}, "B4"),
        ({"content": [{"type": "text", "text": "B4"}]}, "B4"),
    ],
)
def test_output_of_a_span_and_of_a_trace_is_a_message_only_in_the_form_of_one(content: object, text: str) -> None:
    assert steps_of("langfuse", [observation("SPAN", "book", 0, input="Book one.", output=content)]) == [("thought", text)]
    assert steps_of("langfuse", TRACE | {"output": content}) == [("thought", text)]


def test_calls_without_a_content_are_a_message() -> None:
    calls = {"tool_calls": CALLED["tool_calls"]}
    assert steps_of("langfuse", [*generations(([ASKED], calls)), *OBSERVATIONS[2:]]) == STEPS


def test_traces_and_their_observations_may_be_in_different_files() -> None:
    listed = TRACE | {"projectId": "p", "observations": [each["id"] for each in OBSERVATIONS]}
    (trace,) = converted("", {"data": [listed]}, {"data": OBSERVATIONS})
    assert steps_in(trace) == STEPS


def test_scores_are_fields_by_their_names() -> None:
    scores = [{"name": "sure", "value": 0.25}, {"name": "ok", "value": 0, "stringValue": "passed", "dataType": "CATEGORICAL"}]
    scores += [{"name": "sure", "value": 0.5, "timestamp": "2025-01-01T00:00:00Z", "observationId": "obs-1"}]
    scores = [{"name": "sure", "value": 0.25, "timestamp": "2024-01-01T00:00:00Z"}, *scores[1:]]
    scores += [{"name": "sure", "value": 0.75, "timestamp": "2023-01-01T00:00:00Z"}]
    paths = {"confidence": "scores.sure", "success": "scores.ok"}
    supplied = SUPPLIED._replace(confidence=None, success=None, paths=paths)
    (trace,) = converted("", EXPORTED_TRACE | {"scores": scores}, supplied=supplied)
    assert (trace["outcome"]["confidence"], trace["metadata"]["success"]) == (0.25, True)


def test_id_is_written_as_in_a_url_and_a_long_one_becomes_a_digest() -> None:
    *traces, long = converted("langfuse", *[TRACE | {"id": f"über {n}%"} for n in (1, 2)], TRACE | {"id": "y" * 300})
    assert [trace["id"] for trace in traces] == [f"kp:trace:langfuse:%C3%BCber%20{n}%25" for n in (1, 2)]
    assert re.fullmatch("kp:trace:langfuse:[0-9a-f]{32}", long["id"])
    assert long["metadata"]["source_id"] == "y" * 300


REFUSED: Final = {
    "langfuse": [
        (7, "$"),
        ({}, "$"),
        ({"id": ""}, "id"),
        ({"data": [5]}, "data.0"),
        (OBSERVATIONS[0] | {"traceId": None}, "traceId"),
        (TRACE | {"observations": {}}, "observations"),
        (TRACE | {"observations": ["obs-1", "obs-2"]}, "observations.0"),
        (TRACE | {"observations": [OBSERVATIONS[1] | {"startTime": "at noon"}]}, "observations.0.startTime"),
        (TRACE | {"timestamp": 5, "observations": []}, "timestamp"),
        (TRACE | {"observations": [OBSERVATIONS[2] | {"name": None}]}, "observations.0.name"),
        (TRACE | {"input": None}, "$"),
    ]
}
EXPECTED: Final[Json] = json.loads((EXPORTS / "expected.json").read_text("utf-8")) if EXPORTS.is_dir() else {}
"""A person's account of each real run in an export of Langfuse, by the name of the file."""


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"there are no real exports in {EXPORTS}")
@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_real_run_becomes_the_trace_that_a_person_would_write(name: str) -> None:
    (trace,) = converted("langfuse", json.loads((EXPORTS / name).read_text("utf-8")))
    expected, objective = EXPECTED[name], trace["task"]["objective"]
    assert expected["objective_contains"] in objective
    assert not objective.startswith(("{", "[", '"', "system:")), "the request alone"
    assert (expected["result_contains"] or "") in trace["outcome"]["result_summary"]
    read = trace["steps"]
    if expected["tools"] is not None:
        calls = Counter(step["tool"]["name"] for step in read if "tool" in step)
        optional = {tool.removesuffix("?") for tool in expected["tools"] if tool.endswith("?")}
        expected_calls = Counter(tool for tool in expected["tools"] if not tool.endswith("?"))
        assert Counter({tool: count for tool, count in calls.items() if tool not in optional}) == expected_calls
        # A call that ends the run, such as ``final_result``, has no result.
        assert sum(step["type"] == "observation" for step in read) >= expected_calls.total()
    contents = [step["content"] for step in read]
    assert len(contents) == len(set(contents)), "nothing twice"
    assert not any('"parameters"' in content for content in contents), "no definition of a tool"


EXAMPLES: Final[dict[str, object]] = {"langfuse": EXPORTED_TRACE}
