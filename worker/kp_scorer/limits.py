"""Defines the limits on a submission, and checks JSON against them before it is parsed, which bounds the cost of parsing."""

import re
from itertools import accumulate
from typing import Annotated, Final, Self

from pydantic import BaseModel, Field

from kp_scorer.errors import InvalidTrace

LARGEST_NUMBER: Final = 10**15  # The largest number in settings: scripts in Redis compute with doubles, RabbitMQ with 64 bits.
Count = Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]


class Limits(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """The limits on a submission. A value that equals its limit is allowed."""

    message_bytes: Count = 1_048_576  # Size of the trace as UTF-8 JSON, in bytes.
    values: Count = 20_000  # Number of objects, lists, texts, numbers and the like; an empty object or list counts as two.
    steps: Count = 2_000
    field_chars: Count = 100_000  # Length of any one string, in characters.
    depth: Annotated[int, Field(ge=8, le=200)] = 32  # Nesting of objects and lists, counted from the trace itself.

    @classmethod
    def of(cls, message_bytes: int) -> Self:
        """Return the limits of submissions of ``message_bytes``; above the default, the other limits grow in proportion."""
        usual = cls()
        factor = max(1.0, message_bytes / usual.message_bytes)
        scaled = {name: int(getattr(usual, name) * factor) for name in ("values", "steps", "field_chars")}
        return cls(message_bytes=message_bytes, **scaled)


_MOST_DIGITS: Final = 1_000  # The most digits of a number, as its conversion from and to text takes quadratic time.
HUGE_NUMBER: Final = f"expected numbers of at most {_MOST_DIGITS} digits"
_DIGITS: Final = b"0123456789"
_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS: Final = b"0" * (_MOST_DIGITS + 1)
_STRING: Final = re.compile(rb'"[^"]*"')
_MOST_NESTING: Final = 500
"""Python 3.11 parses a few levels more, later versions thousands, but workers on all versions must refuse the same JSON."""
_LEVELS: Final = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))
_NO_BRACKETS: Final = bytes(set(range(256)) - _LEVELS.keys())


def check_size(raw: bytes, limits: Limits) -> None:
    """Raise InvalidTrace if unparsed JSON exceeds the limits of size or values; see :func:`check_values`."""
    if len(raw) > limits.message_bytes:
        raise InvalidTrace.whole(f"expected at most {limits.message_bytes} bytes, got {len(raw)}")
    check_values(raw, limits.values, limits.depth)


def check_values(raw: bytes, most: int, depth: int = _MOST_NESTING) -> None:
    """Raise InvalidTrace if unparsed JSON has more than ``most`` values, each of which costs memory and time, or a huge number.

    Also raise it for nesting that some versions of Python cannot parse; the message then names the limit ``depth``.
    """
    # The first count includes commas, brackets and digits in texts. For most submissions it is low enough nevertheless, and the
    # texts need not be removed.
    if _too_many(raw, most) and (expected := _too_many(_without_texts(raw, most), most)):
        raise InvalidTrace.whole(expected)
    if raw.count(b"[") + raw.count(b"{") > _MOST_NESTING:
        brackets = _without_texts(raw, most).translate(None, _NO_BRACKETS)
        if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > _MOST_NESTING:
            raise InvalidTrace.whole(f"expected nesting of at most {depth}")


def compact_bytes(raw: bytes, most_values: int) -> int:
    """Return the bytes that unparsed JSON would have without escapes and spaces; raise InvalidTrace for too many texts."""
    # A parsed text may take four times as much memory.
    escapes = raw.replace(b"\\\\", b"")
    # The character for which an escape of six bytes stands takes at least two bytes if it is a control, and one otherwise.
    saved = 5 * escapes.count(b"\\u") - escapes.count(b"\\u000") - escapes.count(b"\\u001") + escapes.count(b"\\/")
    around = _without_texts(escapes, most_values)
    spaces = len(around) - len(around.translate(None, b" \t\r\n"))
    return len(raw) - saved - spaces


def _without_texts(raw: bytes, most_values: int) -> bytes:
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A value has at most two texts: itself and its name. Each text that is removed costs time and memory.
    if unescaped.count(b'"') > 4 * most_values:
        raise InvalidTrace.whole(f"expected at most {most_values} values")
    return _STRING.sub(b"", unescaped)


def _may_exceed(json_bytes: bytes, most: int) -> bool:
    # Count the value after each comma, the first item of each bracket, and the outermost value.
    return len(json_bytes) > most and 1 + sum(map(json_bytes.count, (b",", b"[", b"{"))) > most


def _too_many(json_bytes: bytes, most: int) -> str | None:
    if _may_exceed(json_bytes, most):
        return f"expected at most {most} values"
    return HUGE_NUMBER if _has_too_many_digits(json_bytes) else None


def _has_too_many_digits(json_bytes: bytes) -> bool:
    # A number with too many digits has a digit at some multiple of _MOST_DIGITS. Most texts have few digits at such places.
    places = [at * _MOST_DIGITS for at, byte in enumerate(json_bytes[::_MOST_DIGITS]) if byte in _DIGITS]
    around = (json_bytes[max(0, place - _MOST_DIGITS) : place + _MOST_DIGITS + 1] for place in places)
    return any(_TOO_MANY_DIGITS in digits.translate(_DIGITS_ALIKE) for digits in around)


def is_surely_within(raw: bytes, limits: Limits) -> bool:
    """Return whether JSON is within the limits of size and values, even after it is serialised again."""
    # Serialising makes at most five bytes of one: 1e15 becomes 1000000000000000.0.
    return len(raw) <= limits.message_bytes // 5 and not _may_exceed(raw, limits.values)
