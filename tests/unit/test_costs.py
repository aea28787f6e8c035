"""The cost of reading a submission is bounded: sizes are checked before anything is parsed, and errors do not pile up."""

import json
import re
import zlib
from typing import Any, Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.broker.wire import TASK_NAME, arguments_in
from kp_scorer.decoding import decode_trace, loads
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits, check_values, compact_bytes, is_surely_within

from tests.support.builders import LIMITS, decode_json, maximal_payload, minimal_payload, step
from tests.support.calls import traced_memory
from tests.support.costly import FILLERS, PLACES, filled, oversized_bodies
from tests.support.traces import sample_traces
from tests.unit.test_plain_messages import message

MOST_BYTES: Final = 50_000_000
MEGABYTE: Final = 1_000_000
CALLING: Final = {"task": TASK_NAME}
TEXTS: Final = st.text(st.characters(), max_size=8) | st.sampled_from([",", "[{", '"', "\\", '\\"', '\\\\"', '",', "9" * 1_001])
VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


def counted(value: Any) -> int:
    """Return the number of values in ``value``, itself included; an empty object or list counts as two."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + (sum(map(counted, value)) or 1) if isinstance(value, list) else 1


def refused(raw: bytes) -> InvalidTrace:
    with pytest.raises(InvalidTrace) as caught:
        decode_json(raw, LIMITS)
    return caught.value


def problems_of(raw: bytes, limits: Limits) -> str:
    try:
        decode_trace(json.loads(raw), limits)
    except InvalidTrace as error:
        return str(error)
    return ""


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
@example(["\\", ",", 1], True, None)
@example({'\\"': {}, "[": []}, False, None)
def test_values_are_counted_without_parsing(value: object, ascii_alone: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_alone, indent=indent).encode("utf-8", "surrogatepass")
    exact = counted(value)
    check_values(raw, exact)
    with pytest.raises(InvalidTrace):
        check_values(raw, exact - 1)


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
@example("\b/\x01\x1f\u20ac\ud800\U0001f600\\u0041 \t", True, None)
def test_compact_bytes_are_no_more_than_the_smallest_encoding(value: object, ascii_alone: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_alone, indent=indent).encode("utf-8", "surrogatepass").replace(b"/", b"\\/")
    shortest = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    least = compact_bytes(raw, LIMITS.values)
    assert least <= len(shortest)
    assert least == len(shortest) or b"\\u" in raw


@given(VALUES, st.booleans())
@example([1e15, -9e15, 1e999] * 99, False)
@example(["\x01", "\ud800", "\u00e9" * 999], True)
def test_small_json_is_within_the_limits_however_it_is_written_again(value: object, ascii_alone: bool) -> None:
    document = json.dumps(minimal_payload(steps=[step("thought", input={"a": value})]), ensure_ascii=ascii_alone)
    raw = document.replace("000000000000000.0", "e15").replace("Infinity", "1e999").encode("utf-8", "surrogatepass")
    limits = Limits(message_bytes=5 * len(raw), values=len(raw))
    assert is_surely_within(raw, limits)
    assert not is_surely_within(raw + b" ", limits)
    fewer = limits.model_copy(update={"values": 5})
    assert not is_surely_within(raw, fewer)
    assert not re.search("bytes|values", problems_of(raw, limits))


@given(VALUES, st.booleans())
@example(["\ud800", 10**300, -0.0, 1e999, float("nan"), "\x7f\u20ac"], True)
def test_json_is_parsed_as_python_parses_it(value: object, ascii_alone: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_alone).encode("utf-8", "surrogatepass")
    try:
        expected = repr(json.loads(raw.decode("utf-8")))
    except ValueError as error:
        with pytest.raises(type(error)):
            loads(raw)
    else:
        assert repr(loads(raw)) == expected


@pytest.mark.parametrize("number", ["7" * 1_001, "-" + "7" * 1_001, "0." + "7" * 1_001, "1e" + "7" * 1_001])
def test_long_numbers_are_refused_before_they_are_converted(number: str) -> None:
    assert str(refused(filled("steps.0.input", number, 1))) == "$: expected numbers of at most 1000 digits"
    decode_json(filled("steps.0.input", "7" * 1_000, 1), LIMITS)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "item", ["{}", "0", '"\\ud800"', '{"":{"":{"":0}}}', '{"step_id":"","type":0,"content":0,"tool":{},"input":0}', '","']
)
def test_worst_of_a_megabyte_takes_little_memory_and_few_errors(place: str, item: str) -> None:
    raw = filled(place, item, MEGABYTE // (len(item) + 1))
    with traced_memory() as memory:
        assert len(refused(raw).problems) <= 20
    assert memory.peak_bytes < MOST_BYTES


def test_steps_beyond_the_limit_are_not_checked() -> None:
    assert str(refused(filled("steps", "0", LIMITS.steps + 1))) == "steps: expected at most 2000 steps, got 2001"


def test_body_of_a_message_is_bounded_as_its_trace_is() -> None:
    callbacks = '{"callbacks": null, "errbacks": null, "chain": null, "chord": null}'
    for trace in sample_traces():
        arguments_in(message(f"[[{json.dumps(trace)}],{{}},{callbacks}]".encode(), CALLING), LIMITS)
    largest = filled("steps.0.input", "0", LIMITS.values - 60)
    decode_json(largest, LIMITS)
    arguments_in(message(b"[[%s],{},%s]" % (largest, callbacks.encode()), CALLING), LIMITS)
    with pytest.raises(InvalidTrace, match="expected at most 20100 values"):
        arguments_in(message(b"[[%s],{},null]" % filled("steps.0.input", "0", LIMITS.values + 100), CALLING), LIMITS)


def test_a_trace_may_be_written_with_every_escape_and_much_white_space() -> None:
    payload = maximal_payload() | {"unknown": ["\u00e9" * 90_000] * 5}
    raw = json.dumps([[payload], {}, None], indent=8).encode() + b" " * MEGABYTE
    assert len(raw) > 3 * LIMITS.message_bytes
    arguments_in(message(raw, CALLING), LIMITS)


@pytest.mark.parametrize("name", FILLERS)
def test_a_packed_body_that_unpacks_beyond_the_limit_is_not_parsed(name: str) -> None:
    packed = zlib.compress(dict(oversized_bodies(LIMITS))[f"body of {name}"])
    assert len(packed) < 20_000
    with traced_memory() as memory, pytest.raises(InvalidTrace, match="expected at most"):
        arguments_in(message(packed, CALLING | {PACKED_BY: "gzip"}), LIMITS)
    assert memory.peak_bytes < 3 * 4 * MEGABYTE
