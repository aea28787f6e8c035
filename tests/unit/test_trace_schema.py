"""The published JSON Schema of a trace accepts exactly the traces that the decoder accepts."""

import re
from calendar import monthrange
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError  # type: ignore[import-untyped]
from jsonschema.validators import extend  # type: ignore[import-untyped]
from kp_scorer.characters import check_name
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.trace import DOMAIN_BYTES, IsoDatetime, ReasoningTrace
from pydantic import TypeAdapter
from pydantic import ValidationError as PydanticError

from tests.support.builders import maximal_payload, minimal_payload, without
from tests.support.json_values import Place, places_in, replaced

SCHEMA: Final = ReasoningTrace.model_json_schema()
LIMITS: Final = Limits(depth=200)


def _pattern(_: object, pattern: str, instance: object, __: object) -> Iterator[ValidationError]:
    """Match as ECMA-262 does, which JSON Schema demands: Python's $ also matches before a final line break."""
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield ValidationError("no match")


OurValidator: Final = extend(Draft202012Validator, {"pattern": _pattern})
VALIDATOR: Final = OurValidator(SCHEMA)
TIME: Final = TypeAdapter(IsoDatetime)
TIME_VALIDATOR: Final = OurValidator(SCHEMA["$defs"]["Metadata"]["properties"]["created_at"])


def is_taken(document: Any) -> bool:
    try:
        decode_trace(document, LIMITS)
    except InvalidTrace:
        return False
    return True


def has_a_domain_by_its_description(document: Any) -> bool:
    """Return whether a domain meets the rules that the schema has only in its description."""
    metadata = document.get("metadata")
    domain = metadata.get("task_domain") if isinstance(metadata, dict) else None
    try:
        return not isinstance(domain, str) or len(check_name(domain).encode()) <= DOMAIN_BYTES
    except ValueError:
        return False


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)


ODD: Final = st.sampled_from([0, 1, -1, 1.0, 1.5, -0.0, 1e300, 10**400, "", "x", "thought", "yesterday", [], {}, [1], {"": 1}])
PATTERNS: Final = (SCHEMA["properties"]["id"]["pattern"], SCHEMA["$defs"]["Metadata"]["properties"]["created_at"]["pattern"])
FIELDS: Final = sorted({*places_in(maximal_payload())} - {()}, key=str)


@settings(max_examples=4 * settings().max_examples)
@given(st.sampled_from(FIELDS), JSON | ODD)
@example(("steps", 0, "step_id"), 1.0)
@example(("steps", 0, "latency_ms"), 10**400)
@example(("metadata", "created_at"), "yesterday")
def test_schema_and_reader_agree_on_every_value_of_every_field(path: Place, value: object) -> None:
    document = replaced(maximal_payload(), path, value)
    assume(has_a_domain_by_its_description(document))
    assert VALIDATOR.is_valid(document) == is_taken(document)


def test_schema_and_reader_agree_on_the_fields_that_may_be_missing() -> None:
    documents = {path: without(maximal_payload(), ".".join(map(str, path))) for path in FIELDS}
    accepted = {path for path, document in documents.items() if VALIDATOR.is_valid(document)}
    assert accepted == {path for path, document in documents.items() if is_taken(document)} != set()


@settings(max_examples=2 * settings().max_examples)
@given(*(st.from_regex(pattern, fullmatch=True) for pattern in PATTERNS))
def test_ids_and_times_that_the_schema_accepts_are_those_of_traces(trace_id: str, created_at: str) -> None:
    document = replaced(minimal_payload(trace_id=trace_id), ("metadata", "created_at"), created_at)
    assume(VALIDATOR.is_valid(document))
    decode_trace(document, LIMITS)


def is_time(written: str) -> tuple[bool, bool]:
    """Return whether a text is a time according to the schema, and whether it is one according to the decoder."""
    try:
        TIME.validate_python(written)
    except PydanticError:
        return TIME_VALIDATOR.is_valid(written), False
    return TIME_VALIDATOR.is_valid(written), True


@given(st.datetimes(), st.sampled_from(["", "Z", "z", "+00:00", "-23:59", "+0530", "+05"]), st.sampled_from("Tt "))
def test_every_valid_time_is_accepted(time: datetime, zone: str, separator: str) -> None:
    assert is_time(time.isoformat(separator) + zone) == (True, True)


@pytest.mark.parametrize("year", [0, 1, 4, 100, 400, 1900, 2000, 2023, 2024, 9999])
def test_only_days_of_the_calendar_are_accepted(year: int) -> None:
    for month in range(14):
        days = monthrange(year, month)[1] if year and 1 <= month <= 12 else 0
        accepted = [day for day in range(33) if is_time(f"{year:04}-{month:02}-{day:02}T00:00:00Z") == (True, True)]
        refused = [day for day in range(33) if is_time(f"{year:04}-{month:02}-{day:02}T00:00:00Z") == (False, False)]
        assert (accepted, len(refused)) == ([*range(1, days + 1)], 33 - days)
