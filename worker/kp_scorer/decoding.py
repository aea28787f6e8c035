"""Decodes the bytes that a producer sends into a checked :class:`~kp_scorer.trace.ReasoningTrace`.

Unknown fields are ignored. Any other mistake is an :class:`~kp_scorer.errors.InvalidTrace`, which names the path of the field
and never repeats its value, because trace content must not reach logs or error messages.

Cheap checks come first and bound the cost of the later ones: bytes and values are counted before anything is parsed, steps
before any is checked, and a list is checked only up to its first invalid item. ``tests/benchmarks/validation.py`` searches for
the most expensive submission.
"""

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from itertools import accumulate, islice
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import from_json

from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.trace import LateOutcome, ReasoningTrace

LARGEST_NUMBER: Final = 10**15  # The largest number in settings: scripts in Redis compute with doubles, RabbitMQ with 64 bits.
Count = Annotated[int, Field(ge=1, le=LARGEST_NUMBER)]


class Limits(BaseModel, frozen=True, extra="forbid", hide_input_in_errors=True):
    """The limits on a submission. A value that equals its limit is allowed."""

    message_bytes: Count = 1_048_576  # Size of the trace as UTF-8 JSON, in bytes.
    values: Count = 20_000  # Number of objects, lists, texts, numbers and the like; an empty object or list counts as two.
    steps: Count = 2_000  # Number of steps.
    field_chars: Count = 100_000  # Length of any one string, in characters.
    depth: Annotated[int, Field(ge=8, le=200)] = 32  # Nesting of objects and lists, counted from the trace itself.

    @classmethod
    def of(cls, message_bytes: int) -> Self:
        """Return the limits of submissions of ``message_bytes``; above the default, the other limits grow in proportion."""
        usual = cls()
        factor = max(1.0, message_bytes / usual.message_bytes)
        scaled = {name: int(getattr(usual, name) * factor) for name in ("values", "steps", "field_chars")}
        return cls(message_bytes=message_bytes, **scaled)


_MOST_PROBLEMS: Final = 10  # The problems that an error lists. Every single value may be over a limit.
_MOST_DIGITS: Final = 1_000  # The digits of one number. Its conversion from and to text takes quadratic time.
_HUGE_NUMBER: Final = f"expected numbers of at most {_MOST_DIGITS} digits"
_DIGITS: Final = b"0123456789"
_DIGITS_ALIKE: Final = bytes.maketrans(b"123456789", b"000000000")
_TOO_MANY_DIGITS: Final = b"0" * (_MOST_DIGITS + 1)
_JSON_WORDS: Final = {"tuple_type": "Input should be a valid array", "model_type": "Input should be a valid object"}
_ALWAYS_FINE: Final = (int, bool)  # Parsed values of these types exceed no limit.
_JSON_KEYS: Final = (str, int, float, bool, type(None))  # The types of an object's keys, which json writes as texts.
_STRING: Final = re.compile(rb'"[^"]*"')
_MOST_NESTING: Final = 500
"""Python 3.11 parses few more levels, later versions parse thousands, but workers on any version must refuse the same JSON."""
_LEVELS: Final = dict(zip(b"[{]}", (1, 1, -1, -1), strict=True))
_NO_BRACKETS: Final = bytes(set(range(256)) - _LEVELS.keys())

_Submission = TypeVar("_Submission", ReasoningTrace, LateOutcome)


def loads(raw: bytes) -> Any:
    """Parse UTF-8 JSON as ``json.loads`` does, in a fraction of the time; raise the same errors."""
    try:
        return from_json(raw, cache_strings="keys")
    except ValueError:
        # ``from_json`` refuses some texts that json reads: those with lone surrogates, or nesting beyond 200.
        return json.loads(raw.decode("utf-8"))


def parse_json(raw: bytes, limits: Limits) -> object:
    """Parse UTF-8 JSON of at most ``limits.message_bytes`` and ``limits.values``; raise InvalidTrace, which names the place."""
    _check_size(raw, limits)
    try:
        return loads(raw)
    except UnicodeDecodeError as error:
        raise _invalid(f"expected UTF-8; byte {error.start} is not") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"expected JSON; {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise _invalid(_HUGE_NUMBER) from None


def parsed_or_refused(raw: bytes, limits: Limits) -> object:
    """Parse JSON as :func:`parse_json` does, but return an InvalidTrace in place of raising it."""
    try:
        return parse_json(raw, limits)
    except InvalidTrace as error:
        return error


def parse_strict_json(raw: bytes, limits: Limits) -> object:
    """Parse UTF-8 JSON of any length that every other program can read, too; raise InvalidTrace for NaN or deep nesting."""
    of_any_length = limits.model_copy(update={"message_bytes": len(raw), "field_chars": len(raw)})
    parsed = parse_json(raw, of_any_length)
    if expected := _expected_within(parsed, 1, of_any_length):
        raise _invalid(expected)
    return parsed


def check_values(raw: bytes, most: int, depth: int = _MOST_NESTING) -> None:
    """Raise InvalidTrace if unparsed JSON has more than ``most`` values, each of which costs memory and time, or a huge number.

    Also raise it for nesting that some versions of Python cannot parse; the message then names the limit ``depth``.
    """
    # Texts may contain commas, brackets and digits too, but even so the count of most submissions is low enough.
    if _too_many(raw, most) and (expected := _too_many(_without_texts(raw, most), most)):
        raise _invalid(expected)
    if raw.count(b"[") + raw.count(b"{") > _MOST_NESTING:
        brackets = _without_texts(raw, most).translate(None, _NO_BRACKETS)
        if max(accumulate(map(_LEVELS.__getitem__, brackets)), default=0) > _MOST_NESTING:
            raise _invalid(f"expected nesting of at most {depth}")


def compact_bytes(raw: bytes, most_values: int) -> int:
    """Return the size in bytes that unparsed JSON would have without escapes and without white space between values.

    A parsed text may take four times as much memory. Raises InvalidTrace if there are too many texts for ``most_values``.
    """
    escapes = raw.replace(b"\\\\", b"")
    # An escape of six bytes stands for a control character, which takes two bytes at least, or for another, which takes one.
    saved = 5 * escapes.count(b"\\u") - escapes.count(b"\\u000") - escapes.count(b"\\u001") + escapes.count(b"\\/")
    around = _without_texts(escapes, most_values)
    spaces = len(around) - len(around.translate(None, b" \t\r\n"))
    return len(raw) - saved - spaces


def _without_texts(raw: bytes, most_values: int) -> bytes:
    unescaped = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A value has at most two texts: itself and its name. Each text that is removed costs time and memory.
    if unescaped.count(b'"') > 4 * most_values:
        raise _invalid(f"expected at most {most_values} values")
    return _STRING.sub(b"", unescaped)


def _may_exceed(json_bytes: bytes, most: int) -> bool:
    # Count a value for each comma, as one follows it; for each bracket, as its first item; and the outermost one.
    return len(json_bytes) > most and 1 + sum(map(json_bytes.count, (b",", b"[", b"{"))) > most


def _too_many(json_bytes: bytes, most: int) -> str | None:
    if _may_exceed(json_bytes, most):
        return f"expected at most {most} values"
    return _HUGE_NUMBER if _has_too_many_digits(json_bytes) else None


def _has_too_many_digits(json_bytes: bytes) -> bool:
    # A number with too many digits has a digit at some multiple of _MOST_DIGITS. Most texts have few digits at such places.
    places = [at * _MOST_DIGITS for at, byte in enumerate(json_bytes[::_MOST_DIGITS]) if byte in _DIGITS]
    around = (json_bytes[max(0, place - _MOST_DIGITS) : place + _MOST_DIGITS + 1] for place in places)
    return any(_TOO_MANY_DIGITS in digits.translate(_DIGITS_ALIKE) for digits in around)


def decode_trace(payload: object, limits: Limits) -> ReasoningTrace:
    """Check parsed JSON and freeze it as a trace; raise InvalidTrace, which names the fields, but only one item of a list."""
    return decode_for_sending(payload, limits)[0]


def decode_for_sending(payload: object, limits: Limits) -> tuple[ReasoningTrace, bytes]:
    """Check parsed JSON, as :func:`decode_trace` does; return the trace, and the UTF-8 JSON with all unknown fields."""
    raw = _as_bytes(payload, limits)
    _check_size(raw, limits)
    return check_trace(payload, limits), raw


def is_surely_within(raw: bytes, limits: Limits) -> bool:
    """Return whether JSON is within the limits of size and values, even after it is serialized again."""
    # Serializing makes at most five bytes of one: 1e15 becomes 1000000000000000.0.
    return len(raw) <= limits.message_bytes // 5 and not _may_exceed(raw, limits.values)


def check_trace(payload: object, limits: Limits) -> ReasoningTrace:
    """Check JSON that :func:`parse_json` has parsed within the same limits, and freeze it as a trace; raise InvalidTrace."""
    if not isinstance(payload, dict):
        raise _invalid("expected a JSON object that is a ReasoningTrace")
    steps = payload.get("steps")
    if isinstance(steps, list | tuple) and len(steps) > limits.steps:
        raise InvalidTrace([Problem("steps", f"expected at most {limits.steps} steps, got {len(steps)}")])
    return _validated(ReasoningTrace, payload, limits)


def is_late_outcome(payload: object) -> bool:
    """Return whether parsed JSON is meant as a late outcome."""
    return isinstance(payload, dict) and payload.get("@type") == "LateOutcome"


def check_late_outcome(payload: object, limits: Limits) -> LateOutcome:
    """Check parsed JSON and freeze it as a late outcome; raise InvalidTrace, which names the fields."""
    return _validated(LateOutcome, payload, limits)


def _validated(model: type[_Submission], payload: object, limits: Limits) -> _Submission:
    try:
        submission = model.model_validate(payload)
    except ValidationError as error:
        raise InvalidTrace(_problems(error)) from None
    if problems := list(islice(_over_limits(submission, limits), _MOST_PROBLEMS)):
        raise InvalidTrace(problems)
    return submission


def _problems(error: ValidationError) -> list[Problem]:
    problems = [
        Problem(".".join(map(str, item["loc"])) or "$", _JSON_WORDS.get(item["type"], item["msg"]))
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    # pydantic counts only valid items, so it also reports a list whose only item is invalid as too short.
    inner = {problem.field.partition(".")[0] for problem in problems if "." in problem.field}
    return [problem for problem in problems if problem.field != "steps" or "steps" not in inner]


def _as_bytes(payload: object, limits: Limits) -> bytes:
    # A list that contains itself leads to a RecursionError, as does one that is nested too deeply.
    dumps = partial(json.dumps, payload, separators=(",", ":"), check_circular=False)
    try:
        return dumps(ensure_ascii=False).encode()
    except UnicodeEncodeError:
        # The text has a lone surrogate, which JSON can only escape. In a field that is read, this is an error of its own.
        return dumps().encode()
    except RecursionError:
        raise _invalid(f"expected nesting of at most {limits.depth}") from None
    except TypeError:
        expected = "expected only what JSON has: objects, arrays, strings, numbers, booleans, null"
        raise InvalidTrace([Problem(_field_that_is_no_json(payload), expected)]) from None
    except ValueError:
        raise _invalid(_HUGE_NUMBER) from None


def _field_that_is_no_json(payload: object) -> str:
    """Return the path of the first value that JSON cannot represent, as far as the model names it: other keys are content."""
    schema = ReasoningTrace.model_json_schema()
    fields = {name for part in (schema, *schema["$defs"].values()) for name in part.get("properties", ())}
    # Search in the order of serialization, so that no list that contains itself comes before that value.
    left: list[tuple[str, bool, object]] = [("", True, payload)]
    while left:
        path, is_named, value = left.pop()
        if isinstance(value, dict):
            named = [(str(key), is_named and key in fields, each) for key, each in value.items() if isinstance(key, _JSON_KEYS)]
            if len(named) < len(value):
                return path or "$"
        elif isinstance(value, list | tuple):
            named = [(str(index), is_named, each) for index, each in enumerate(value)]
        elif isinstance(value, _JSON_KEYS):
            continue
        else:
            return path or "$"
        left += ((f"{path}.{name}".lstrip(".") if grows else path, grows, each) for name, grows, each in reversed(named))
    return "$"


def _check_size(raw: bytes, limits: Limits) -> None:
    if len(raw) > limits.message_bytes:
        raise _invalid(f"expected at most {limits.message_bytes} bytes, got {len(raw)}")
    check_values(raw, limits.values, limits.depth)


def _invalid(expected: str) -> InvalidTrace:
    return InvalidTrace([Problem("$", expected)])


def _over_limits(trace: ReasoningTrace | LateOutcome, limits: Limits) -> Iterator[Problem]:
    """Yield the problems that pydantic cannot find: values over the limits, and invalid values in free-form objects."""
    parts: list[tuple[str, int, BaseModel | tuple[Any, ...]]] = [("", 1, trace)]
    most_chars = limits.field_chars
    while parts:
        path, depth, part = parts.pop()
        for name, value in enumerate(part) if isinstance(part, tuple) else part.__dict__.items():
            # Most values end here, which matters: this loop takes longer than all of pydantic.
            kind = type(value)
            if value is None or kind in _ALWAYS_FINE or (kind is str and len(value) <= most_chars and value.isascii()):
                continue
            if kind is tuple or isinstance(value, BaseModel):
                parts.append((f"{path}{name}.", depth + 1, value))
            elif expected := _expected_within(value, depth + 1, limits):
                # The path ends at a free-form value, as its keys are content.
                yield Problem(f"{path}{name}", expected)


def _expected_within(value: object, depth: int, limits: Limits) -> str | None:
    """Return the expectation that a text, a number or a part of a free-form value fails first; None if it is valid."""
    # Go level by level: free-form values may be nested more deeply than the stack allows.
    level = [value]
    while level:
        deeper: list[object] = []
        for item in level:
            if isinstance(item, str):
                if len(item) > limits.field_chars:
                    return f"expected at most {limits.field_chars} characters, got {len(item)}"
                try:
                    item.encode()
                except UnicodeEncodeError:
                    return "expected Unicode text, got a lone surrogate"
            elif isinstance(item, float):
                if not math.isfinite(item):
                    return "expected a finite number"
            elif isinstance(item, dict | list | tuple):
                if depth > limits.depth:
                    return f"expected nesting of at most {limits.depth}"
                deeper.extend(item)
                if isinstance(item, dict):
                    deeper.extend(item.values())
        level, depth = deeper, depth + 1
    return None
