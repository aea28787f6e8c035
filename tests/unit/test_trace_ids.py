"""What may be the id of a trace, wherever one is read; and its domain, which goes to logs and tables as well."""

import json
import string
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kp_scorer.broker.task_message import checked_id
from kp_scorer.client import Client
from kp_scorer.decoding import decode_json, decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.settings import load_settings
from kp_scorer.trace import DOMAIN_BYTES, TRACE_ID_PREFIX

from tests.support.builders import LIMITS, minimal_payload

LONGEST: Final = 191
PRINTABLE: Final = string.ascii_letters + string.digits + string.punctuation
NO_IDS: Final = {
    "nothing but the prefix": "",
    "a space": "a b",
    "a line break at the end": "a\n",
    "NUL": "a\0",
    "DEL": "a\x7f",
    "an escape": "a\x1b[2J",
    "a letter beyond ASCII": "é",
    "a digit beyond ASCII": "\u0661",
    "a surrogate": "\ud800",
    "too long": "x" * (LONGEST + 1),
}

ENDINGS: Final = st.one_of(
    st.text(PRINTABLE, max_size=20),
    st.text(st.characters(), max_size=20),
    st.text(PRINTABLE + " \n\x7fé", max_size=20),
    st.integers(LONGEST - 2, LONGEST + 2).map("x".__mul__),
)
VALUES: Final = st.one_of(
    ENDINGS.map(TRACE_ID_PREFIX.__add__),
    st.sampled_from(["", "KP:TRACE:", " kp:trace:", "kp:trace", "\nkp:trace:"]).flatmap(
        lambda start: ENDINGS.map(start.__add__)
    ),
    st.none() | st.booleans() | st.integers() | st.lists(st.text(max_size=3), max_size=2),
)


def is_taken(value: object) -> bool:
    try:
        decode_trace(minimal_payload() | {"id": value}, LIMITS)
    except InvalidTrace:
        return False
    return True


@given(VALUES)
@example(f"{TRACE_ID_PREFIX}a\n")
@example(TRACE_ID_PREFIX + "x" * LONGEST)
@example(TRACE_ID_PREFIX + "x" * (LONGEST + 1))
def test_what_a_trace_may_be_called_is_what_a_message_may_name(value: object) -> None:
    expected = value if is_taken(value) else ""
    assert checked_id(value) == expected
    if isinstance(value, str):
        ending = value.removeprefix(TRACE_ID_PREFIX)
        is_id = ending != value and 1 <= len(ending) <= LONGEST and set(ending) <= set(PRINTABLE)
        assert bool(expected) == is_id


@pytest.mark.parametrize("ending", NO_IDS.values(), ids=NO_IDS.keys())
def test_no_other_id_leaves_the_client(ending: str) -> None:
    url = "redis://127.0.0.1:1/0"
    with (
        Client(load_settings({"broker.url": url, "redis.url": url})) as client,
        pytest.raises(InvalidTrace, match=r"^id: ") as caught,
    ):
        client.submit(minimal_payload(trace_id=TRACE_ID_PREFIX + ending))
    assert ending == "" or ending not in str(caught.value), "it is content"


def test_escapes_in_json_are_what_they_stand_for() -> None:
    raw = json.dumps(minimal_payload(trace_id="kp:trace:\x7f")).encode()
    with pytest.raises(InvalidTrace, match=r"^id: "):
        decode_json(raw, LIMITS)


ACTING: Final = (
    "\0",
    "\t",
    "\n",
    "\r",
    "\x1b",
    "\x7f",
    "\x85",
    "\x9b",
    "\u2028",
    "\u2029",
    "\u200f",
    "\u061c",
    "\u202e",
    "\u2066",
)


@pytest.mark.parametrize("domain", ["x" * DOMAIN_BYTES, "\u00e9" * (DOMAIN_BYTES // 2), "\u65e5\u672c\u8a9e", "a b/c-d_e"])
def test_domain_may_be_of_any_script_within_its_bytes(domain: str) -> None:
    assert decode_trace(minimal_payload(domain=domain), LIMITS).metadata.task_domain == domain


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        ("", "1 to 200 bytes of UTF-8"),
        ("x" * (DOMAIN_BYTES + 1), "1 to 200 bytes of UTF-8"),
        ("\u00e9" * (DOMAIN_BYTES // 2 + 1), "1 to 200 bytes of UTF-8"),
        *((f"fin{odd}ance", "no control, line separating or bidirectional characters") for odd in ACTING),
    ],
    ids=ascii,
)
def test_domain_that_a_log_or_a_terminal_could_not_bear_is_refused(domain: str, expected: str) -> None:
    with pytest.raises(InvalidTrace) as caught:
        decode_trace(minimal_payload(domain=domain), LIMITS)
    assert caught.value.problems == (("metadata.task_domain", f"expected {expected}"),)
