"""A trace is accepted, or refused with the path of the field and without its content."""

import json
import math
import traceback
from collections.abc import Callable
from typing import Any, Final

import pytest
from kp_scorer.decoding import decode_for_sending, decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import (
    LIMITS,
    Payload,
    changed,
    decode_json,
    leaves,
    maximal_payload,
    minimal_payload,
    step,
    steps,
    without,
)

FREE_FORM: Final = ("steps.0.input", "task.input_schema")
STRINGS: Final = [
    path for path, value in leaves(maximal_payload()).items() if isinstance(value, str) and not path.startswith(FREE_FORM)
]
NUMBERS: Final = ["metadata.quality_score", "steps.1.step_id", "steps.0.latency_ms", "outcome.confidence"]
OBJECTS: Final = ["metadata", "task", "steps.1", "steps.0.tool", "steps.0.input", "outcome", "knowledge_graph_delta"]
LISTS: Final = ["steps", "metadata.validated_by", "knowledge_graph_delta.entities", "knowledge_graph_delta.relationships"]
LITERALS: Final = ["@context", "@type", "metadata.visibility", "metadata.privacy_level", "steps.1.type"]
REQUIRED: Final = [
    *("@context", "@type", "id", "metadata", "task", "steps", "outcome"),
    *("metadata.created_at", "metadata.task_domain", "metadata.success", "metadata.visibility", "metadata.privacy_level"),
    *("task.objective", "steps.1.step_id", "steps.1.type", "steps.0.tool.name", "outcome.result_summary", "outcome.confidence"),
    *("knowledge_graph_delta.entities.0.name", "knowledge_graph_delta.relationships.0.valid_from"),
]
MARKER: Final = "QZXJ0123456789"


def refusal(decode: Callable[[], ReasoningTrace]) -> InvalidTrace:
    with pytest.raises(InvalidTrace) as caught:
        decode()
    return caught.value


def refused_fields(payload: object, limits: Limits = LIMITS) -> list[str]:
    return [problem.field for problem in refusal(lambda: decode_trace(payload, limits)).problems]


def nested(levels: int, *innermost: object) -> list[Any]:
    value: list[Any] = [*innermost]
    for _ in range(levels - 1):
        value = [value]
    return value


def test_maximal_trace_keeps_every_field() -> None:
    trace = decode_trace(maximal_payload(), LIMITS)
    assert trace.model_dump(mode="json", exclude_unset=True) == maximal_payload()


@pytest.mark.parametrize(
    "path", ["x", "metadata.x", "task.x", "steps.0.x", "steps.0.tool.x", "outcome.x", "knowledge_graph_delta.entities.0.x"]
)
@pytest.mark.parametrize(
    "value", [1, math.nan, "\ud800", nested(50), {"deep": {}}], ids=lambda value: str(type(value).__name__)
)
def test_unknown_field_is_ignored(path: str, value: object) -> None:
    assert decode_trace(changed(maximal_payload(), path, value), LIMITS) == decode_trace(maximal_payload(), LIMITS)


@pytest.mark.parametrize(
    ("paths", "wrong"),
    [
        (STRINGS, [1, True, ["x"], {"x": "y"}]),
        (NUMBERS, ["1", True, [1], {}, -1, -0.001, math.nan, math.inf, -math.inf]),
        (OBJECTS, ["x", 1, False, ["x"]]),
        (LISTS, ["x", 1, {"0": "x"}]),
        (["metadata.success"], ["true", 1, 0, []]),
        (LITERALS, ["", "Network", "thought "]),
        (["steps.1.step_id"], [1.5, -1.0]),
        (["metadata.quality_score", "outcome.confidence"], [1.0000001, 2, 10**400]),
        (["metadata.created_at"], ["", "now", "2026-01-01", "2026-13-01T00:00:00Z", "2026-01-01T25:00:00Z", "1767225600"]),
        (["metadata.created_at"], ["yesterday", "2026-02-29T00:00:00Z", "1900-02-29T00:00:00Z", "2026-01-01T00:00:00Z\n"]),
        (["metadata.task_domain", "task.objective"], [""]),
        (["steps"], [[]]),
        (STRINGS, ["\ud800", "a\udfff"]),
    ],
)
def test_wrong_value_is_refused_with_its_path_alone(paths: list[str], wrong: list[object]) -> None:
    refusals = {
        (path, repr(value)): refused_fields(changed(maximal_payload(), path, value)) for path in paths for value in wrong
    }
    assert refusals == {(path, value): [path] for path, value in refusals}


@pytest.mark.parametrize("path", REQUIRED)
def test_missing_or_null_required_field_is_refused_with_its_path(path: str) -> None:
    assert refused_fields(without(maximal_payload(), path)) == [path]
    assert refused_fields(changed(maximal_payload(), path, None)) == [path]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.created_at", "2026-01-01T00:00"),
        ("metadata.created_at", "2026-01-01T00:00:00.123456+05:30"),
        ("metadata.created_at", "2026-01-01t00:00:00z"),
        ("metadata.created_at", "2000-02-29 23:59:60Z"),
        ("steps.1.step_id", 1.0),
        ("outcome.confidence", 0),
        ("outcome.confidence", 1),
        ("metadata.quality_score", 0),
        ("steps.0.latency_ms", 0),
        ("steps.1.step_id", 10**30),
        ("steps.0.tool.name", ""),
        ("steps.0.input", {}),
        ("metadata.task_domain", "__proto__"),
        ("knowledge_graph_delta", {}),
    ],
)
def test_unusual_value_is_valid(path: str, value: object) -> None:
    decode_trace(changed(maximal_payload(), path, value), LIMITS)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", {"\udfff": 1}, [{"a": [-math.inf]}]], ids=ascii)
@pytest.mark.parametrize("path", ["steps.0.input", "task.input_schema"])
def test_free_form_value_is_refused_by_the_path_of_its_field(path: str, value: object) -> None:
    assert refused_fields(changed(maximal_payload(), path, {"key": value})) == [path]


def test_error_has_every_problem_and_shows_three() -> None:
    error = refusal(lambda: decode_trace({}, LIMITS))
    assert [problem.field for problem in error.problems] == ["@context", "@type", "id", "metadata", "task", "steps", "outcome"]
    assert str(error).startswith("@context: Field required; ")
    assert str(error).endswith("; and 4 more")


@pytest.mark.parametrize(
    "payload", [None, [], "text", 1, True, [minimal_payload()], minimal_payload() | {"unknown": nested(20_000)}]
)
def test_payload_that_is_no_object_or_too_deeply_nested_is_refused_at_its_root(payload: object) -> None:
    assert refused_fields(payload) == ["$"]


@pytest.mark.parametrize(
    ("field", "payload", "path", "most"),
    [
        ("steps", minimal_payload(steps=steps(*["thought"] * 9)), "steps", 9),
        ("field_chars", changed(maximal_payload(), "task.objective", "é" * 90), "task.objective", 90),
        ("field_chars", changed(maximal_payload(), "steps.0.input", {"k" * 90: 1}), "steps.0.input", 90),
        ("values", changed(maximal_payload(), "steps.0.input", {"a": [1, [], {"b": None}]}), "$", 56),
        ("depth", changed(maximal_payload(), "task.input_schema", nested(38)), "task.input_schema", 40),
        ("depth", changed(maximal_payload(), "steps.0.input", {"a": nested(36)}), "steps.0.input", 40),
    ],
)
def test_limit_is_inclusive(field: str, payload: Payload, path: str, most: int) -> None:
    roomy = {"steps": 2_000, "field_chars": 100_000, "depth": 100}
    decode_trace(payload, Limits(**(roomy | {field: most})))
    assert refused_fields(payload, Limits(**(roomy | {field: most - 1}))) == [path]


@pytest.mark.parametrize("text", ["plain", "é日本\U0001f600"])
def test_limit_on_bytes_is_inclusive_and_counts_utf8(text: str) -> None:
    payload = minimal_payload(objective=text)
    raw = json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
    exact, short = Limits(message_bytes=len(raw)), Limits(message_bytes=len(raw) - 1)
    assert decode_json(raw, exact) == decode_trace(payload, exact)
    assert refused_fields(payload, short) == ["$"]
    assert refusal(lambda: decode_json(raw, short)).problems[0].field == "$"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"id": "\xff"}', "expected UTF-8; byte 8 is not"),
        (b"", "expected JSON"),
        (b'{"id":\n nope}', "at line 2 column 2"),
        (b"[" * 9_000, "expected nesting of at most 32"),
        (b"[" * 9_000 + b"]" * 9_000, "expected nesting of at most 32"),
        (b'{"a":' * 9_000, "expected nesting of at most 32"),
        (b'{"a":' * 501 + b"1" + b"}" * 501, "expected nesting of at most 32"),
        (b"[" * 500 + b'"[{"' + b"]" * 500, "expected a JSON object"),
        (b"[]", "expected a JSON object"),
        (b"NaN", "expected a JSON object"),
        (b"\xef\xbb\xbf{}", "expected JSON"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bytes_that_are_no_json_object_are_refused_with_the_place(raw: bytes, expected: str) -> None:
    (problem,) = refusal(lambda: decode_json(raw, LIMITS)).problems
    assert problem.field == "$"
    assert expected in problem.expected


@pytest.mark.parametrize(
    "value", [MARKER * 20_000, f"{MARKER}\ud800", nested(5_000, MARKER)], ids=["too long", "lone surrogate", "too deep"]
)
def test_refusal_never_repeats_content(value: object) -> None:
    error = refusal(lambda: decode_trace(minimal_payload(steps=[step("thought", input={MARKER: value})]), LIMITS))
    assert MARKER not in "".join([repr(error), *traceback.format_exception(error)])


@pytest.mark.parametrize("unknown", [1.5, "größer", {"a": [None, True]}, "\ud800 is half of a character, ü is one"])
def test_bytes_for_sending_keep_every_field(unknown: object) -> None:
    payload = maximal_payload() | {"unknown": unknown}
    trace, raw = decode_for_sending(payload, LIMITS)
    assert json.loads(raw.decode()) == payload
    assert decode_json(raw, LIMITS) == trace == decode_trace(payload, LIMITS)
