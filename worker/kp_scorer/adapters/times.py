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
_MOST_DIGITS: Final = 19


def first_timestamp(records: Iterable[Node]) -> str | None:
    """Return the time of the first record that has one, as ISO 8601; None if no record has."""
    return next(filter(None, map(time_in, records)), None)


def time_in(record: Node) -> str | None:
    """Return the time of a record as ISO 8601, from any field and form; None if the record has no time that can be read."""
    if not isinstance(record.value, dict):
        return None
    for place in record.all_plain(*_TIMES):
        time = time_in(place) if isinstance(place.value, dict) else time_of(place)
        if time:
            return time
    return None


def time_of(place: Node) -> str | None:
    """Return a time as ISO 8601, from a text or from a number since 1970 in any unit; None for anything else."""
    value = place.value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MOST_DIGITS:
        value = int(value)
    with suppress(NotConverted):
        if isinstance(value, str) and value:
            in_utc = moment(place, microseconds(place))
            return value if _RFC3339.fullmatch(value) else in_utc
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300:
            # Its size shows the unit: times of today are some 10^9 seconds, 10^12 ms, 10^15 µs or 10^18 ns.
            return moment(place, value * 10.0 ** (6 - 3 * min(3, max(0, int((math.log10(value) - 9) // 3)))))
    return None


def moment(node: Node, microseconds: float) -> str:
    """Return a time in microseconds since 1970 as ISO 8601 in UTC; raise NotConverted if its year is not in 1 to 9999."""
    try:
        return (_EPOCH + timedelta(microseconds=int(microseconds))).isoformat()
    except OverflowError:
        raise node.refusal("expected a time in the years 1 to 9999") from None


def microseconds(node: Node) -> int:
    """Return an ISO 8601 time, by default in UTC, in microseconds since 1970; raise NotConverted for anything else."""
    try:
        time = datetime.fromisoformat(node.required_text())
    except ValueError:
        raise node.refusal("expected an ISO 8601 date and time") from None
    return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
