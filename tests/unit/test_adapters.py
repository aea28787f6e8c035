"""All formats share the rules for errors, recoveries and ids, and no record raises anything but NotConverted."""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kp_scorer.adapters import FORMATS, MOST_DEPTH, converter, format_of
from kp_scorer.adapters.building import Run
from kp_scorer.adapters.node import Node, objects_in
from kp_scorer.adapters.shown import shown_by_python
from kp_scorer.limits import Limits
from kp_scorer.trace import is_trace_id

from tests.support.calls import calls_during
from tests.support.converting import SUPPLIED, converted, converted_and_refused, refused_fields
from tests.support.json_values import places_in, replaced
from tests.unit import test_adapter_langfuse, test_message_shapes
from tests.unit import test_adapter_otel as otel
from tests.unit.test_adapter_openai import assistant, call, result, user

MODULES: Final = [import_module(f"tests.unit.{path.stem}") for path in Path(__file__).parent.glob("test_adapter_*.py")]
EXAMPLES: Final[dict[str, object]] = {name: example for module in MODULES for name, example in module.EXAMPLES.items()}
"""An example of each format, from the test of the format."""
REFUSED: Final[list[tuple[str, object, str | None]]] = [
    (name, *case) for module in MODULES for name, cases in getattr(module, "REFUSED", {}).items() for case in cases
]
"""Sources in a format, each with the field that its error names, or without one if it is left out."""
GROUPED: Final = ("otel", "langfuse", "claude-code", "codex", "session", "span-rows")
"""Formats in which several records make up a run, so that it is converted only once it is complete."""
of_each_format = pytest.mark.parametrize("name", sorted(FORMATS))


def chat(*turns: str) -> list[dict[str, Any]]:
    """Return a conversation: ``?`` asks, ``!`` says, ``>`` calls a tool, ``<`` is a result, and ``!…>`` says and calls."""
    messages = [user("Do it.")]
    for text in turns:
        if text.startswith("<"):
            messages.append(result("c", text[1:]))
        elif text.startswith("?"):
            messages.append(user(text[1:]))
        else:
            messages.append(assistant(text.strip("!>"), *([call("c", "f", "{}")] if text.endswith(">") else [])))
    return messages


def types(*turns: str) -> list[str]:
    (trace,) = converted("openai", chat(*turns))
    return [step["type"] for step in trace["steps"]]


ERRORS: Final = (
    "Error: no such table",
    "error executing query: no such table",
    "\n  ValueError: no such table",
    "sqlite3.OperationalError: no such table",
    "Traceback (most recent call last):\n  File",
    '{"error": "no such table"}',
    '{"isError": true, "content": []}',
    '{"is_error": true}',
)
OTHERS: Final = (
    *("", "no error: all is well", "Errors: 0", "Error handling is described in chapter 4", "terror: a history"),
    *('{"error": null, "rows": 3}', '{"error": ""}', '{"isError": false}', '[{"error": "x"}]', '{"error": '),
)


@pytest.mark.parametrize("result", [*ERRORS, *OTHERS])
def test_only_a_result_that_looks_like_an_error_makes_the_next_try_a_recovery(result: str) -> None:
    again = "error_recovery" if result in ERRORS else "tool_call"
    assert types(">", f"<{result}", ">", "<ok", "!Done.") == ["tool_call", "observation", again, "observation", "thought"]


def test_only_the_first_step_of_a_turn_that_tries_again_is_a_recovery() -> None:
    assert types(">", "<Error: x", "!Again.>", "<ok")[2:] == ["error_recovery", "tool_call", "observation"]
    assert types(">", "<Error: x", "!I stop.") == ["tool_call", "observation", "thought"]
    stopped = types(">", "<Error: x", "!I stop.", "?Try.", ">", "<ok")
    assert stopped[2:] == ["thought", "observation", "tool_call", "observation"]
    assert types(">", "<Error: x", "?Try.", ">", "<ok")[2:] == ["observation", "error_recovery", "observation"]
    assert types(">", "<Error: x", ">", "<Error: y", ">", "<ok").count("error_recovery") == 2


@of_each_format
def test_converting_twice_gives_the_same(name: str) -> None:
    (trace,) = converted(name, EXAMPLES[name])
    (again,) = converted(name, json.loads(json.dumps(EXAMPLES[name], sort_keys=True)))
    assert again == trace
    assert is_trace_id(trace["id"])
    assert trace["id"].startswith(f"kp:trace:{name}:")


def test_id_without_one_in_the_record_is_that_of_its_content() -> None:
    traces = converted("openai", chat("!a"), chat("!b"), chat("!a"))
    assert [traces[0]["id"] == trace["id"] for trace in traces] == [True, True, False]


@of_each_format
def test_a_refused_source_is_reported_and_the_others_are_converted(name: str) -> None:
    traces, refused = converted_and_refused(name, ["x", EXAMPLES[name], 7])
    assert len(traces) == 1
    assert [str(error).partition(":")[0] for error in refused] == ["line 1", "line 3"] or name in GROUPED
    assert {error.line for error in refused} == {1, 3}


@pytest.mark.parametrize(("name", "source", "field"), REFUSED)
def test_errors_name_the_place(name: str, source: object, field: str | None) -> None:
    assert refused_fields(name, source) == ([(1, field)] if field else [])


def test_whole_trace_over_a_limit_is_named_at_its_record() -> None:
    assert refused_fields("openai", chat(*["!x"] * (Limits().steps + 1))) == [(1, "$")]


@of_each_format
def test_record_that_is_nested_too_deep_is_refused(name: str) -> None:
    deep: object = 1
    for _ in range(MOST_DEPTH + 1):
        deep = [deep]
    _, refused = converted_and_refused(name, [deep, {"messages": deep}])
    assert [error.problems[0].field for error in refused] == ["$", "$"]
    assert "nesting" in str(refused[0])


SECRET: Final = "the mast is rotten"


def spoilt(value: Any) -> Any:
    """Return a copy of a value with a text at the head of each list and in place of each number, except under ``key``."""
    if isinstance(value, list):
        return [SECRET, *map(spoilt, value)]
    if isinstance(value, dict):
        return {key: inner if key == "key" else spoilt(inner) for key, inner in value.items()}
    return SECRET if isinstance(value, int | float) else value


@of_each_format
def test_errors_never_quote_the_record(name: str) -> None:
    spelt_otherwise = json.dumps(EXAMPLES[name]).replace("role", "rôle").replace("type", SECRET).replace("Time", SECRET)
    sources = [spoilt(EXAMPLES[name]), json.loads(spelt_otherwise), SECRET, [SECRET], {SECRET: SECRET}]
    _, refused = converted_and_refused(name, sources)
    assert len(refused) >= 3
    assert not any(SECRET in str(error) for error in refused)


JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\ud800", '[{"role": 1}]']),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@of_each_format
@settings(max_examples=2 * settings().max_examples)
@given(data=st.data())
def test_any_record_gives_a_valid_trace_or_an_error_that_names_the_place(name: str, data: st.DataObject) -> None:
    example = EXAMPLES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        example = replaced(example, data.draw(st.sampled_from([*places_in(example)])), data.draw(JSON))
    # An exception that escapes fails this test, as does an invalid trace.
    _, refused = converted_and_refused(name, [example], SUPPLIED._replace(success=data.draw(st.sampled_from([True, None]))))
    for error in refused:
        assert error.line == 1
        assert all(problem.field and problem.expected for problem in error.problems)


def test_span_without_a_time_is_refused_with_its_run_though_that_would_wait() -> None:
    undated = otel.WINDY[0] | {"startTimeUnixNano": None, "endTimeUnixNano": 0, "spanId": "7" * 16}
    valid = otel.export(*(each | {"traceId": "2" * 32} for each in otel.WINDY))
    traces, (refused,) = converted_and_refused("otel", [otel.export(undated), valid])
    fields = [problem.field for problem in refused.problems]
    assert (fields, len(traces)) == (["resourceSpans.0.scopeSpans.0.spans.0.startTimeUnixNano"], 1)


PATH: Final = r"(llm.input_messages|gen_ai.completion).[01](.message)?.(role|content|tool_calls|contents)(.0(.tool_call)?)?"


@given(paths=st.dictionaries(st.from_regex(PATH, fullmatch=True), JSON, max_size=6))
def test_any_paths_of_attributes_give_a_valid_trace_or_an_error(paths: dict[str, Any]) -> None:
    calls = otel.span("chat", 0, 1, paths | {"openinference.span.kind": "LLM"})
    converted_and_refused("otel", [otel.export(calls, *otel.WINDY)])


SHAPED: Final = [got for shapes in test_message_shapes.SHAPES.values() for got in shapes]


@settings(max_examples=3 * settings().max_examples)
@given(data=st.data())
def test_any_change_of_any_shape_gives_a_valid_trace_or_an_error(data: st.DataObject) -> None:
    got = data.draw(st.sampled_from(SHAPED))
    for _ in range(data.draw(st.integers(1, 3))):
        got = replaced(got, data.draw(st.sampled_from([*places_in(got)])), data.draw(JSON))
    for kind in ("GENERATION", "CHAIN", "TOOL"):
        converted_and_refused("langfuse", [test_adapter_langfuse.observation(kind, "f", 0, input=got, output=got)])
    converted_and_refused("openai", [got, {"request": got, "response": got}])


ODD: Final[tuple[object, ...]] = (
    *(math.nan, math.inf, -math.inf, 1e308, 10**18, 10**30, 10**400, -(10**400), -1, -1e-9, True),
    *("NaN", "Infinity", "1e999", "9" * 18, "9" * 19, "9" * 30, "1" * 5_000, "-5", "\u0661\u0662", "\ud800"),
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "2026-01-01T00:00:00+23:59:59.999999", "2026-W01-1"),
    *([], ["x"], {}, {"x": {"y": []}}, 0, None, "", "x", "[0x" + "f" * 4_000 + ", '']"),
)
"""Odd values: some that no calendar or JSON allows, some too large for arithmetic, and some of every other type.

The last one is Python for a number with too many digits to be written.
"""

RESPONSE: Final = {"input": "Is it windy?", "output": [{"role": "assistant", "content": "Very."}], "created_at": 1_767_225_600}


@pytest.mark.parametrize(("name", "example"), [*EXAMPLES.items(), ("openai", RESPONSE)])
def test_odd_values_anywhere_give_a_valid_trace_or_an_error_of_the_record(
    name: str, example: object, pytestconfig: pytest.Config
) -> None:
    # Each run of the suite tries a third of all pairs, chosen by its seed.
    pairs = [*product(places_in(example), ODD)][int(pytestconfig.option.hypothesis_seed) % 3 :: 3]
    for path, odd in pairs:
        traces, refused = converted_and_refused(name, [replaced(example, path, odd)])
        # Only an object may give nothing at all, because it may be a record that belongs to no run.
        assert traces or refused or not odd or isinstance(odd, dict)
        assert not any("defect" in str(error) for error in refused), (path, odd)


def otel_chat(turns: int) -> object:
    """Return a chat with a tool, in which each call of a model repeats the history."""
    spans: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    for turn in range(turns):
        history.append(otel.message("user", otel.text(f"Question {turn}")))
        calling = otel.CALL | {"id": f"call_{turn}"}
        for part in (calling, otel.text(f"Answer {turn}")):
            answer = otel.message("assistant", part)
            spans.append(otel.chat(10 * len(spans), 10 * len(spans) + 5, history, [answer]))
            history.append(answer)
            if part is calling:
                history.append(otel.response("14 m/s", f"call_{turn}"))
    return otel.export(*spans)


def langfuse_chat(turns: int) -> object:
    """Return a chat in which each call of a model repeats the history."""
    observations: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    for turn in range(turns):
        history.append(user(f"Question {turn}"))
        answer = assistant(f"Answer {turn}")
        start = f"2026-02-03T08:{turn // 60:02}:{turn % 60:02}Z"
        observation = test_adapter_langfuse.observation("GENERATION", "answer", 0, input=[*history], output=answer)
        observations.append(observation | {"startTime": start, "endTime": start})
        history.append(answer)
    return test_adapter_langfuse.TRACE | {"input": None, "output": None, "observations": observations}


def otel_chain(spans: int) -> object:
    """Return a chain of tools, each within another, which all have the same name."""
    chained = [otel.tool("f", n, spans, attributes={"gen_ai.tool.call.result": "ok"}) for n in range(spans)]
    for outer, inner in pairwise(chained):
        inner["parentSpanId"] = outer["spanId"]
    return otel.export(otel.WINDY[0], *chained)


def otel_calls_of_one_id(turns: int) -> object:
    """Return answers of a model that each call a tool, all under the same id."""
    answers = [otel.chat(n, n, [otel.ASKED], [otel.CALLED]) for n in range(turns)]
    return otel.export(*answers, *(otel.tool("get_wind", turns, turns, "call_1") for _ in answers))


@pytest.mark.parametrize(
    ("name", "source"),
    [("otel", otel_chat), ("langfuse", langfuse_chat), ("otel", otel_chain), ("otel", otel_calls_of_one_id)],
)
def test_twice_as_long_a_run_takes_twice_the_steps(name: str, source: Callable[[int], object]) -> None:
    half, twice = (calls_during(partial(converted_and_refused, name, [source(count)])) for count in (60, 120))
    assert twice < 2.1 * half


def lists_of_lists(levels: int) -> Any:
    value: Any = {"role": "user", "content": "Any mail?"}
    for _ in range(levels):
        value = {"results": [value]}
    return value


def test_lists_within_lists_are_searched_in_a_few_levels_only() -> None:
    assert format_of(lists_of_lists(2)) == "openai"
    assert format_of(lists_of_lists(240)) == ""
    assert calls_during(partial(converted_and_refused, "openai", [lists_of_lists(45)])) < 10_000


def test_run_whose_clock_is_ahead_and_that_lacks_a_span_is_looked_at_rarely() -> None:
    def made(spans: int) -> list[object]:
        in_a_year = 365 * 24 * 3_600_000
        ahead = [otel.span("ahead", in_a_year + number, -1, {}, parent="f" * 16) for number in range(spans)]
        others = [otel.chat(11_000 * n, 11_000 * n, [otel.ASKED], [otel.ANSWERED], traceId=f"{n:032}") for n in range(spans)]
        return [otel.export(*ahead, otel.span("root", in_a_year, -1, {})), *map(otel.export, others)]

    half, twice = (calls_during(partial(converted_and_refused, "otel", made(count))) for count in (60, 120))
    assert twice < 2.1 * half


def test_chat_of_800_turns_is_a_trace_of_all_its_messages() -> None:
    (trace,) = converted("langfuse", langfuse_chat(800))
    assert [step["content"] for step in trace["steps"]][-2:] == ["Question 799", "Answer 799"]
    assert len(trace["steps"]) == 2 * 800 - 1


def test_run_of_too_many_records_is_refused_and_others_are_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converter, "_MOST_RECORDS", 10)
    others = [otel.WINDY[1] | {"traceId": f"{n:032x}"} for n in range(2)]
    sources = [otel.export(others[0]), otel_chat(6), otel.export(others[1])]
    traces, refused = converted_and_refused("otel", sources)
    assert len(traces) == 2
    assert [str(error) for error in refused] == [
        "line 2: resourceSpans.0.scopeSpans.0.spans.0: expected a run of at most 10 records"
    ]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("langfuse", test_adapter_langfuse.EXPORTED_TRACE | {"scores": [{"name": ["x"], "value": 1}]}),
        ("", {"data": [{"data": []}]}),
        ("openai", {"messages": chat("!a"), "schema_version": 10**4_000}),
        (
            "otel",
            [
                otel.export(otel.WINDY[0] | {"traceId": "f" * 32, "events": 5}),
                {
                    "resourceLogs": [
                        {
                            "scopeLogs": [
                                {"logRecords": [otel.WINDY[0] | {"traceId": "f" * 32, "parentSpanId": None, "body": {}}]}
                            ]
                        }
                    ]
                },
            ],
        ),
    ],
)
def test_records_that_once_ended_the_conversion_are_read_or_refused(name: str, record: object) -> None:
    traces, refused = converted_and_refused(name, [record, EXAMPLES[name or "openai"]])
    assert len(traces) + len(refused) == 2
    assert traces
    assert "defect" not in str(refused)


@of_each_format
def test_objects_of_a_format_fit_it_and_no_other_specific_format(name: str) -> None:
    for item in objects_in(EXAMPLES[name] if isinstance(EXAMPLES[name], list) else [EXAMPLES[name]]):
        specific = [fitting for fitting, each in FORMATS.items() if each.fits(item) and not each.is_general]
        assert specific == ([] if FORMATS[name].is_general else [name])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': {1, 2}, 'b': b'x'}", {"a": None, "b": None}),
        ("['a long '\n 'text']", ["a long text"]),
        ("Message(role='user', content=None)", {"role": "user", "content": None}),
    ],
)
def test_value_that_python_shows_is_read_as_json_has_it(text: str, value: object) -> None:
    assert shown_by_python(text, MOST_DEPTH) == value


@pytest.mark.parametrize("text", ["[not]", "{1, 'a': 2}", "[a=1]", "['a': 1]", "{[1]: 2}", "[1", "1, 2", "(]"])
def test_text_that_python_would_not_show_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        shown_by_python(text, MOST_DEPTH)


def test_more_values_shown_by_python_than_any_trace_has_are_not_read() -> None:
    assert len(shown_by_python("[" + "1, " * 20_000 + "'1']", MOST_DEPTH)) == 20_001

    def read_a_megabyte() -> None:
        with pytest.raises(ValueError, match=r"^$"):
            shown_by_python("[" + "a," * 497_000 + "1]='", MOST_DEPTH)

    # Reading the text to its end would take twenty times as many calls.
    assert calls_during(read_a_megabyte) < 1_000_000


def test_defect_of_the_package_refuses_only_the_run_that_hits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(own: str, nodes: Sequence[Node]) -> Run:
        raise KeyError(SECRET)

    monkeypatch.setitem(FORMATS, "atif", FORMATS["atif"]._replace(run=fails))
    traces, refused = converted_and_refused("", [EXAMPLES["atif"], EXAMPLES["openai"]])
    assert len(traces) == 1
    assert "kp-scorer has a defect: KeyError in fails:" in str(refused[0])
    assert SECRET not in str(refused[0])
