"""Reads the times of records, in any field, form and unit."""

import math
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

from kp_scorer.adapters.node import Node
from kp_scorer.errors import NotConverted

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339: Final = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:\d\d)")
_TIMES: Final = (
    "timestamp created createdat createtime starttime startedat time ts requestcreatedat requesttime sessionstart date".split()  # noqa: SIM905
)
"""The plain names of fields with the time of a record."""
_NUMBER: Final = re.compile(r"[0-9]{1,7}|[0-9]{9,19}(?:\.[0-9]{0,9})?")  # Eight digits are a date.
_LEAST_GUESSED_S: Final = 10**8  # A smaller number, which would be before 1973, is a duration, or a date without hyphens.


def first_timestamp(records: Iterable[Node]) -> str | None:
    """Return the time of the first record that has one, as ISO 8601; None if no record has."""
    return next(filter(None, map(time_in, records)), None)


def time_in(record: Node) -> str | None:
    """Return the time of a record as ISO 8601, from any field and form; None if the record has no time that can be read.

    A small number counts as a duration, because fields such as ``time`` may have either.
    """
    if not isinstance(record.value, dict):
        return None
    for place in record.all_plain(*_TIMES):
        time = time_in(place) if isinstance(place.value, dict) else time_of(place)
        number = _number(place.value)
        if time and (number is None or number >= _LEAST_GUESSED_S):
            return time
    return None


def time_of(place: Node) -> str | None:
    """Return a time as ISO 8601, from a text or from a number since 1970 in any unit; None for anything else."""
    value, number = place.value, _number(place.value)
    with suppress(NotConverted):
        if number is not None and 0 < number < 1e300:
            # Its size shows the unit: times of today are some 10^9 seconds, 10^12 ms, 10^15 µs or 10^18 ns.
            return moment(place, number * 10.0 ** (6 - 3 * min(3, max(0, int((math.log10(number) - 9) // 3)))))
        if number is None and isinstance(value, str) and value:
            in_utc = moment(place, microseconds(place))
            return value if _RFC3339.fullmatch(value) else in_utc
    return None


def _number(value: object) -> float | None:
    """Return a number, also one in a text; None for anything else."""
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value) if "." in value else int(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def moment(node: Node, microseconds: float) -> str:
    """Return a time in microseconds since 1970 as ISO 8601 in UTC; raise NotConverted if its year is not in 1 to 9999."""
    try:
        return (_EPOCH + timedelta(microseconds=int(microseconds))).isoformat()
    except OverflowError:
        raise node.refusal("expected a time in the years 1 to 9999") from None


def microseconds(node: Node) -> int:
    """Return an ISO 8601 time, by default in UTC, in microseconds since 1970; raise NotConverted for anything else."""
    try:
        time = datetime.fromisoformat(node.required_text().strip().upper())
    except ValueError:
        raise node.refusal("expected an ISO 8601 date and time") from None
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
