"""Decodes the bytes that a producer sends into a checked :class:`~kp_scorer.trace.ReasoningTrace`.

Unknown fields are ignored. Any other mistake is an :class:`~kp_scorer.errors.InvalidTrace`, which names the path of the field
and never repeats its value, because trace content must not reach logs or error messages.

Cheap checks come first and bound the cost of the later ones: bytes and values are counted before anything is parsed, steps
before any is checked, and a list is checked only up to its first invalid item. ``tests/benchmarks/validation.py`` searches for
the most expensive submission.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.limits import HUGE_NUMBER, Limits, check_size
from kp_scorer.trace import LateOutcome, ReasoningTrace

_MOST_PROBLEMS: Final = 10  # An error lists no more problems than this, as every single value may exceed a limit.
_JSON_WORDS: Final = {"tuple_type": "Input should be a valid array", "model_type": "Input should be a valid object"}
_ALWAYS_FINE: Final = (int, bool)  # Parsed values of these types exceed no limit.
_JSON_KEYS: Final = (str, int, float, bool, type(None))  # The types of keys that json accepts and writes as texts.

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
    check_size(raw, limits)
    try:
        return loads(raw)
    except UnicodeDecodeError as error:
        raise InvalidTrace.whole(f"expected UTF-8; byte {error.start} is not") from None
    except json.JSONDecodeError as error:
        raise InvalidTrace.whole(f"expected JSON; {error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        raise InvalidTrace.whole(HUGE_NUMBER) from None


def parsed_or_refused(raw: bytes, limits: Limits) -> object:
    """Parse JSON as :func:`parse_json` does, but return an InvalidTrace in place of raising it."""
    try:
        return parse_json(raw, limits)
    except InvalidTrace as error:
        return error


def parse_strict_json(raw: bytes, limits: Limits) -> object:
    """Parse UTF-8 JSON of any length; raise InvalidTrace if other programs cannot read it, as with NaN or deep nesting."""
    of_any_length = limits.model_copy(update={"message_bytes": len(raw), "field_chars": len(raw)})
    parsed = parse_json(raw, of_any_length)
    if expected := _expected_within(parsed, 1, of_any_length):
        raise InvalidTrace.whole(expected)
    return parsed


def decode_trace(payload: object, limits: Limits) -> ReasoningTrace:
    """Check parsed JSON and freeze it as a trace; raise InvalidTrace with each wrong field, and one item of each list."""
    return decode_for_sending(payload, limits)[0]


def decode_for_sending(payload: object, limits: Limits) -> tuple[ReasoningTrace, bytes]:
    """Check parsed JSON, as :func:`decode_trace` does; return the trace, and its UTF-8 JSON, unknown fields included."""
    raw = _as_bytes(payload, limits)
    check_size(raw, limits)
    return check_trace(payload, limits), raw


def check_trace(payload: object, limits: Limits) -> ReasoningTrace:
    """Check JSON that :func:`parse_json` has parsed within the same limits, and freeze it as a trace; raise InvalidTrace."""
    if not isinstance(payload, dict):
        raise InvalidTrace.whole("expected a JSON object that is a ReasoningTrace")
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
        # JSON can express a lone surrogate only by an escape. In a field of the model, the later checks refuse it.
        return dumps().encode()
    except RecursionError:
        raise InvalidTrace.whole(f"expected nesting of at most {limits.depth}") from None
    except TypeError:
        expected = "expected only what JSON has: objects, arrays, strings, numbers, booleans, null"
        raise InvalidTrace([Problem(_field_that_is_no_json(payload), expected)]) from None
    except ValueError:
        raise InvalidTrace.whole(HUGE_NUMBER) from None


def _field_that_is_no_json(payload: object) -> str:
    """Return the path of the first value that JSON cannot express, up to the last key of the model: other keys are content."""
    schema = ReasoningTrace.model_json_schema()
    fields = {name for part in (schema, *schema["$defs"].values()) for name in part.get("properties", ())}
    # Search in the order of serialisation, so that no list that contains itself comes before that value.
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


def _over_limits(trace: ReasoningTrace | LateOutcome, limits: Limits) -> Iterator[Problem]:
    """Yield the problems that pydantic cannot find: values over the limits, and invalid values in free-form objects."""
    parts: list[tuple[str, int, BaseModel | tuple[Any, ...]]] = [("", 1, trace)]
    most_chars = limits.field_chars
    while parts:
        path, depth, part = parts.pop()
        for name, value in enumerate(part) if isinstance(part, tuple) else part.__dict__.items():
            # Skip most values here, as early as possible: this loop takes longer than all checks of pydantic.
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
