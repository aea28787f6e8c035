"""What all adapters share: what counts as an error and as a recovery, ids, and that nothing but one error ever comes out."""

import json
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kp_scorer.adapters import FORMATS, MOST_DEPTH
from kp_scorer.decoding import Limits
from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.trace import is_trace_id

from tests.support.converting import GIVEN, both, converted, refused_fields
from tests.unit import test_adapter_langfuse, test_adapter_openai, test_adapter_otel, test_adapter_sweagent

EXAMPLES: Final[dict[str, object]] = {
    "openai": {"messages": test_adapter_openai.TIDES},
    "otel": test_adapter_otel.export(*test_adapter_otel.WINDY),
    "sweagent": test_adapter_sweagent.RUN,
    "langfuse": test_adapter_langfuse.WHOLE,
}
of_each_format = pytest.mark.parametrize("name", sorted(FORMATS))


def chat(*said: str) -> list[dict[str, Any]]:
    """A conversation in few words: ``?`` asks, ``!`` says, ``>`` calls a tool, ``<`` is its result; ``!…>`` says and calls."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Do it."}]
    for text in said:
        if text.startswith("<"):
            messages.append({"role": "tool", "tool_call_id": "c", "content": text[1:]})
        elif text.startswith("?"):
            messages.append({"role": "user", "content": text[1:]})
        else:
            calls = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}] if text.endswith(">") else []
            messages.append({"role": "assistant", "content": text.strip("!>"), "tool_calls": calls})
    return messages


def types(*said: str) -> list[str]:
    (trace,) = converted("openai", chat(*said))
    return [step["type"] for step in trace["steps"]]


@pytest.mark.parametrize(
    "result",
    [
        "Error: no such table",
        "error executing query: no such table",
        "\n  ValueError: no such table",
        "sqlite3.OperationalError: no such table",
        "Traceback (most recent call last):\n  File",
        '{"error": "no such table"}',
        '{"isError": true, "content": []}',
        '{"is_error": true}',
    ],
)
def test_result_that_looks_like_an_error_makes_the_next_try_a_recovery(result: str) -> None:
    assert types(">", f"<{result}", ">", "<ok", "!Done.") == [
        "tool_call",
        "observation",
        "error_recovery",
        "observation",
        "thought",
    ]


@pytest.mark.parametrize(
    "result",
    [
        "",
        "no error: all is well",
        "Errors: 0",
        "Error handling is described in chapter 4",
        "terror: a history",
        '{"error": null, "rows": 3}',
        '{"error": ""}',
        '{"isError": false}',
        '[{"error": "x"}]',
        '{"error": ',
    ],
)
def test_other_results_are_no_errors(result: str) -> None:
    assert "error_recovery" not in types(">", f"<{result}", ">", "<ok", "!Done.")


def test_only_the_first_step_of_a_turn_that_tries_again_is_a_recovery() -> None:
    assert types(">", "<Error: x", "!Again.>", "<ok")[2:] == ["error_recovery", "tool_call", "observation"]
    assert types(">", "<Error: x", "!I give up.") == ["tool_call", "observation", "thought"]
    assert types(">", "<Error: x", "!I give up.", "?Try.", ">", "<ok")[2:] == [
        "thought",
        "observation",
        "tool_call",
        "observation",
    ]
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
    assert [traces[0]["id"] == trace["id"] for trace in traces] == [True, False, True]


@of_each_format
def test_over_a_limit_is_named_and_nothing_else_is_lost(name: str) -> None:
    found, refused = both(name, ["x", EXAMPLES[name], InvalidTrace([Problem("$", "expected JSON")])])
    assert len(found) == 1
    assert [str(error).partition(":")[0] for error in refused] == ["line 1", "line 3"] or name in ("otel", "langfuse")
    assert {error.line for error in refused} == {1, 3}


def test_whole_trace_over_a_limit_is_named_at_its_record() -> None:
    messages = chat(*["!x" * 40_000] * 14)
    assert refused_fields("openai", chat("!a"), {"messages": messages}) == [(2, "$")]
    assert refused_fields("openai", chat(*["!x"] * (Limits().steps + 1))) == [(1, "$")]


@of_each_format
def test_record_that_is_nested_too_deep_is_refused(name: str) -> None:
    deep: object = 1
    for _ in range(MOST_DEPTH + 1):
        deep = [deep]
    _, refused = both(name, [deep, {"messages": deep}])
    assert [error.problems[0].field for error in refused] == ["$", "$"]
    assert "nesting" in str(refused[0])


SECRET: Final = "the mast is rotten"


def spoilt(value: Any) -> Any:
    """The same with a text in front of each list and in the place of each number; what is under ``key`` stays."""
    if isinstance(value, list):
        return [SECRET, *map(spoilt, value)]
    if isinstance(value, dict):
        return {key: inner if key == "key" else spoilt(inner) for key, inner in value.items()}
    return SECRET if isinstance(value, int | float) else value


@of_each_format
def test_errors_never_quote_the_record(name: str) -> None:
    spelt_otherwise = json.dumps(EXAMPLES[name]).replace("role", "rôle").replace("type", SECRET).replace("Time", SECRET)
    _, refused = both(name, [spoilt(EXAMPLES[name]), json.loads(spelt_otherwise), SECRET, [SECRET], {SECRET: SECRET}])
    assert len(refused) >= 3
    assert not any(SECRET in str(error) for error in refused)


JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just("\ud800")
    | st.just('[{"role": 1}]'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def paths(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Where every value in a value is."""
    found = [path]
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(inner, (*path, key))
    return found


def changed(value: Any, path: Sequence[str | int], put: object) -> Any:
    if not path:
        return put
    key, *rest = path
    copied: Any = dict(value) if isinstance(value, dict) else list(value)
    copied[key] = changed(value[key], rest, put)
    return copied


@of_each_format
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_a_record_is_it_becomes_a_valid_trace_or_one_error_that_names_the_place(
    name: str, data: st.DataObject
) -> None:
    example = EXAMPLES[name]
    for _ in range(data.draw(st.integers(1, 3))):
        example = changed(example, data.draw(st.sampled_from(paths(example))), data.draw(JSON))
    # What is not caught in there fails this test, as does a trace that is not valid.
    _, refused = both(name, [example], GIVEN._replace(success=data.draw(st.sampled_from([True, None]))))
    for error in refused:
        assert error.line == 1
        assert all(problem.field and problem.expected for problem in error.problems)


@of_each_format
@settings(max_examples=50, deadline=None)
@given(value=JSON)
def test_whatever_json_comes_in_makes_no_other_error(name: str, value: object) -> None:
    both(name, [value, {"data": value}, {"messages": value}, {"trajectory": value}, {"resourceSpans": value}])
