"""The content of a trace: its digest, the text to embed, its id and its domain; and the samples."""

import sys
import time
import unicodedata
from contextlib import suppress
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.broker.wire import checked_id
from kp_scorer.characters import check_name
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.trace import DOMAIN_BYTES, Digests

from tests.support.builders import (
    LIMITS,
    Payload,
    changed,
    leaves,
    make_trace,
    maximal_payload,
    minimal_payload,
    step,
    steps,
    without,
)
from tests.support.costly import COSTLY_TEXTS

UNREAD: Final = {"@context", "@type", "id", "metadata.created_at", "metadata.quality_score", "metadata.quality_threshold"}
OTHERS: Final[dict[str, object]] = {
    "metadata.task_domain": "code",
    "metadata.visibility": "private",
    "metadata.privacy_level": "federated",
    "metadata.success": False,
    "outcome.confidence": 0.95,
    "steps.0.type": "thought",
    "steps.1.type": "thought",
    "steps.0.step_id": 7,
    "steps.1.step_id": 7,
    "steps.0.latency_ms": 12.25,
}
"""Another valid value for each field that accepts only some values."""


def digest(payload: Payload) -> bytes:
    return decode_trace(payload, LIMITS).digest()


SAYING: Final = {path: value for path, value in leaves(maximal_payload()).items() if path not in UNREAD}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("id", "kp:trace:other"),
        ("metadata.created_at", "2031-05-05T10:00:00+02:00"),
        ("metadata.quality_score", 1.0),
        ("metadata.quality_score", None),
        ("unknown", "ignored"),
        ("metadata.unknown", {"ignored": True}),
        ("steps.0.input", {"limits": [1, 2.5, None, True], "query": "select 1"}),
    ],
)
def test_digest_ignores_ids_times_unknown_fields_and_the_order_of_keys(path: str, value: object) -> None:
    assert digest(changed(maximal_payload(), path, value)) == digest(maximal_payload())


def digests_of(content: str) -> Digests:
    return decode_trace(changed(maximal_payload(), "steps.1.content", content), LIMITS).digests()


@pytest.mark.parametrize(
    "otherwise",
    [
        unicodedata.normalize("NFD", 'Zoë paid "5 €"\n\\nowhere'),
        'Zo\u00eb\u200b paid "5\u00a0€"\n\\nowhere',
        ' Zoë  paid "5 €"\r\n\t\\nowhere \n',
        'Zo\ufff9ë\ufffa\ufffb\u2800paid "5 €"\n\\nowhere\u2800',
        'Z\u00adoë\0 paid\b "5 €\ufe0f"\x7f \x9b\\now\U000e0041here',
    ],
)
def test_texts_that_look_alike_are_copies_and_still_other_content(otherwise: str) -> None:
    digests, others = digests_of('Zoë paid "5 €"\n\\nowhere'), digests_of(otherwise)
    assert (others.visible == digests.visible, others.content == digests.content) == (True, False)


@pytest.mark.parametrize(
    "unlike", ["Zoe paid", "Zoë, paid", 'Zoë "paid', "Zoëpaid", "Zoë\\n paid", "Zoë\\u0001 paid", "zoë paid"]
)
def test_texts_that_a_person_can_tell_apart_are_no_copies(unlike: str) -> None:
    assert digests_of("Zoë paid").visible != digests_of(unlike).visible


@pytest.mark.parametrize("text", COSTLY_TEXTS.values(), ids=COSTLY_TEXTS)
def test_no_text_of_a_megabyte_costs_much_time_to_compare_as_seen(text: str) -> None:
    pieces = [text[start : start + LIMITS.field_chars] for start in range(0, len(text), LIMITS.field_chars)]
    trace = make_trace(steps=[step("thought", content=piece) for piece in pieces])
    started = time.process_time()
    trace.digests()
    assert time.process_time() - started < 5


@pytest.mark.parametrize("path", ["steps.1.content", "source_skill", "metadata.agent_id", "knowledge_graph_delta"])
def test_digest_treats_a_missing_field_as_null(path: str) -> None:
    payload = maximal_payload()
    missing = without(payload, path)
    assert digest(missing) == digest(changed(payload, path, None))
    assert digest(missing) != digest(payload)


@pytest.mark.parametrize(("path", "value"), SAYING.items(), ids=SAYING)
def test_digest_depends_on_every_field_with_content(path: str, value: object) -> None:
    changed_value = OTHERS.get(path, f"{value}\n" if isinstance(value, str) else "else")
    assert digest(changed(maximal_payload(), path, changed_value)) != digest(maximal_payload())


def test_digest_depends_on_the_order_of_steps() -> None:
    first, second = (minimal_payload(steps=steps(*types)) for types in (["thought", "tool_call"], ["tool_call", "thought"]))
    assert digest(first) != digest(second)


@given(st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_embedded_text_holds_all_contents_in_order(contents: list[str | None]) -> None:
    trace = make_trace(objective="go", steps=[step("thought", content=content) for content in contents])
    assert trace.embedding_text == "go" + "".join(f" {content or ''}" for content in contents)


def test_did_is_calls_then_thoughts_and_recoveries_each_in_order() -> None:
    contents = [
        *(step("thought", content="think"), step("observation", content="see"), step("tool_call", "sql", content="select")),
        *(step("error_recovery", content="again"), step("tool_call", "sql", content="")),
        step("tool_call", "sql", content="count"),
    ]
    assert make_trace(steps=contents).actions_text == "select count think again"


@pytest.mark.parametrize("calls", [[], [step("tool_call", "sql", content="  ")]])
def test_did_is_all_contents_if_calls_and_thoughts_are_blank(calls: list[Any]) -> None:
    observations = [step("observation", content="one"), step("observation"), step("observation", content="two")]
    assert make_trace(steps=[*calls, *observations]).actions_text == " ".join([*("  " for _ in calls), "one", "two"])


OTHER_SCRIPTS: Final = minimal_payload(objective='Größe prüfen: 你好 \U0001f600\u2028 "\\\n')
NUMBERS: Final = {"b": [1, 1.0, -0.0, 1e22, 1e-7, 2**70], "a": {"é": None, "": True}}


@pytest.mark.parametrize(
    ("payload", "golden"),
    [
        (minimal_payload(), "5a65a37e784d676051a4727af51d255b"),
        (maximal_payload(), "69dadeffaaa2542cc9fb2645ac232157"),
        (changed(OTHER_SCRIPTS, "outcome.result_summary", ""), "8e7142e813226fd06c025befdb72356b"),
        (
            minimal_payload(confidence=0.1, steps=[step("tool_call", "sql", input=NUMBERS, latency_ms=3)]),
            "269e03d55797b12773bb41ace8c30d40",
        ),
        (minimal_payload(steps=[step("thought", content=""), step("tool_call", "")]), "7eb2ff8b1e30712dcd1e32e93da06ef8"),
    ],
    ids=["minimal", "maximal", "other scripts", "numbers", "empty texts"],
)
def test_digests_never_change(payload: Payload, golden: str) -> None:
    # If this fails, workers of two versions on one queue treat each other's traces as conflicts.
    assert digest(payload).hex() == golden


IDS: Final = ("!", "~", "a:b", "x" * 191)
NO_IDS: Final = (
    *(None, True, 7, ["kp:trace:a"], "", "kp:trace", "trace:a", "KP:TRACE:a", " kp:trace:a", "\nkp:trace:a"),
    *(f"kp:trace:{ending}" for ending in ("", " ", "a b", "a\n", "\x7f", "\u00e9", "\ud800", "x" * 192)),
)


@pytest.mark.parametrize("trace_id", [f"kp:trace:{ending}" for ending in IDS])
def test_an_id_is_the_prefix_and_up_to_191_printable_characters_of_ascii(trace_id: str) -> None:
    assert decode_trace(minimal_payload(trace_id=trace_id), LIMITS).id == checked_id(trace_id) == trace_id


@pytest.mark.parametrize("value", NO_IDS, ids=ascii)
def test_other_values_are_neither_trace_ids_nor_message_ids(value: object) -> None:
    assert checked_id(value) == ""
    with pytest.raises(InvalidTrace) as caught:
        decode_trace(minimal_payload() | {"id": value}, LIMITS)
    assert [problem.field for problem in caught.value.problems] == ["id"]


ACTING: Final = "\0\t\n\r\x1b\x7f\x85\x9b\u2028\u2029\u200f\u061c\u202e\u2066"


INVISIBLE: Final = (
    "\u00ad\u034f\u3164\u17b4\u180b\u200b\u200d\u2060\u2065\ufe0f\ufeff\ufff9\u0600"
    "\U0001bca0\U0001d173\U000e0066\U000e0100\U000e0fff"
)
"""Invisible characters: joiners, fillers, selectors, annotations, tags, and the reserved ones among these."""
SPACES: Final = ("\u00a0", "\u1680", "\u2007", "\u200a", "\u202f", "\u205f", "\u2800", "\u3000")
NOT_COMPOSED: Final = ("cafe\u0301", "\u212bngstrom", "a\u0327\u0301\u0323", "\u1100\u1161")


@pytest.mark.parametrize(
    "domain",
    [
        *("x" * DOMAIN_BYTES, "\u00e9" * (DOMAIN_BYTES // 2), "\u65e5\u672c\u8a9e", "a b/c-d_e"),
        *("\u0939\u093f\u0928\u094d\u0926\u0940", "\U0001f6d2", "\u0441ode", " code "),
    ],
    ids=ascii,
)
def test_domain_may_be_in_any_script_within_the_limit_on_bytes(domain: str) -> None:
    assert decode_trace(minimal_payload(domain=domain), LIMITS).metadata.task_domain == domain


@pytest.mark.parametrize(
    ("domain", "expected"),
    [
        ("", "1 to 200 bytes of UTF-8"),
        ("x" * (DOMAIN_BYTES + 1), "1 to 200 bytes of UTF-8"),
        ("\u00e9" * (DOMAIN_BYTES // 2 + 1), "1 to 200 bytes of UTF-8"),
        *((f"fin{odd}ance", "no control, format or other invisible characters") for odd in (*ACTING, *INVISIBLE)),
        *((f"my{odd}bank", "no spaces but U+0020") for odd in SPACES),
        *((odd, "Unicode's normal form C") for odd in NOT_COMPOSED),
    ],
    ids=ascii,
)
def test_domain_that_looks_like_another_or_harms_a_log_or_terminal_is_refused(domain: str, expected: str) -> None:
    with pytest.raises(InvalidTrace) as caught:
        decode_trace(minimal_payload(domain=domain), LIMITS)
    assert caught.value.problems == (("metadata.task_domain", f"expected {expected}"),)


def test_every_format_character_is_refused_in_a_domain() -> None:
    accepted = []
    for character in (chr(code) for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code)) == "Cf"):
        with suppress(ValueError):
            accepted.append(check_name(f"a{character}b"))
    assert accepted == []
