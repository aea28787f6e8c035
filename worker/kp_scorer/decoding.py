"""Decode what a producer sent to a checked :class:`~kp_scorer.trace.ReasoningTrace`.

Unknown fields are ignored. Everything else that does not fit is an :class:`~kp_scorer.errors.InvalidTrace`, which names the
field's path and never repeats its value, because trace content must not reach logs or error messages.
"""

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.trace import ReasoningTrace

Count = Annotated[int, Field(ge=1)]


class Limits(BaseModel):
    """How large a submission may be. Every figure is inclusive."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    message_bytes: Count = 1_048_576
    """Size of the trace as UTF-8 JSON, in bytes."""
    steps: Count = 2_000
    """Number of steps."""
    field_chars: Count = 100_000
    """Length of any one string, in characters."""
    depth: Annotated[int, Field(ge=8, le=200)] = 32
    """Nesting of objects and lists, counted from the trace itself."""


# Python refuses to convert longer numbers from or to text, because that takes quadratic time.
_HUGE_NUMBER: Final = Problem("$", "expected numbers of at most 4300 digits")


def decode_json(raw: bytes, limits: Limits) -> ReasoningTrace:
    """Decode one trace from UTF-8 JSON.

    Raises:
        InvalidTrace: not UTF-8, not JSON, not a trace, or over a limit.
    """
    return decode_trace(parse_json(raw, limits), limits, size_bytes=len(raw))


def parse_json(raw: bytes, limits: Limits) -> object:
    """Parse UTF-8 JSON of at most ``limits.message_bytes``; raises InvalidTrace that names line and column."""
    _check_size(len(raw), limits)
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidTrace([Problem("$", f"expected UTF-8; byte {error.start} is not")]) from None
    except json.JSONDecodeError as error:
        raise InvalidTrace([Problem("$", f"expected JSON; {error.msg} at line {error.lineno} column {error.colno}")]) from None
    except RecursionError:
        raise InvalidTrace([Problem("$", f"expected nesting of at most {limits.depth}")]) from None
    except ValueError:
        raise InvalidTrace([_HUGE_NUMBER]) from None


def decode_trace(payload: object, limits: Limits, *, size_bytes: int | None = None) -> ReasoningTrace:
    """Check parsed JSON and freeze it as a trace. ``size_bytes`` is its size on the wire, measured here if not given.

    Raises:
        InvalidTrace: not a trace, or over a limit; names every offending field.
    """
    if not isinstance(payload, dict):
        raise InvalidTrace([Problem("$", "expected a JSON object that is a ReasoningTrace")])
    if size_bytes is None:
        size_bytes = _size_on_the_wire(payload, limits)
    _check_size(size_bytes, limits)
    try:
        trace = ReasoningTrace.model_validate(payload)
    except ValidationError as error:
        raise InvalidTrace(_problems(error)) from None
    if problems := list(_over_limits(trace, limits)):
        raise InvalidTrace(problems)
    return trace


def _problems(error: ValidationError) -> list[Problem]:
    found = [
        Problem(".".join(map(str, item["loc"])) or "$", _SAID_FOR_JSON.get(item["type"], item["msg"]))
        for item in error.errors(include_url=False, include_context=False, include_input=False)
    ]
    # pydantic counts only valid items, so a list whose only item is invalid seems too short as well.
    inner = {problem.field.partition(".")[0] for problem in found if "." in problem.field}
    return [problem for problem in found if problem.field != "steps" or "steps" not in inner]


_SAID_FOR_JSON: Final = {"tuple_type": "Input should be a valid array", "model_type": "Input should be a valid object"}


def _size_on_the_wire(payload: dict[str, Any], limits: Limits) -> int:
    try:
        # A list that contains itself counts as nested too deep.
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"), check_circular=False)
    except RecursionError:
        raise InvalidTrace([Problem("$", f"expected nesting of at most {limits.depth}")]) from None
    except TypeError:
        raise InvalidTrace(
            [Problem("$", "expected only what JSON has: objects, arrays, strings, numbers, booleans, null")]
        ) from None
    except ValueError:
        raise InvalidTrace([_HUGE_NUMBER]) from None
    return len(text.encode("utf-8", "surrogatepass"))


def _check_size(size_bytes: int, limits: Limits) -> None:
    if size_bytes > limits.message_bytes:
        raise InvalidTrace([Problem("$", f"expected at most {limits.message_bytes} bytes, got {size_bytes}")])


def _over_limits(trace: ReasoningTrace, limits: Limits) -> Iterator[Problem]:
    """Check what pydantic cannot: the settings' limits, and the contents of free-form objects."""
    if len(trace.steps) > limits.steps:
        yield Problem("steps", f"expected at most {limits.steps} steps, got {len(trace.steps)}")
        return
    # Walked with an explicit stack: free-form values may be nested deeper than Python can recurse.
    pending: list[tuple[str, int, object]] = [("", 1, trace)]
    while pending:
        path, depth, value = pending.pop()
        match value:
            case str():
                if len(value) > limits.field_chars:
                    yield Problem(path, f"expected at most {limits.field_chars} characters, got {len(value)}")
                elif not _is_unicode(value):
                    yield Problem(path, "expected Unicode text, got a lone surrogate")
            case float():
                if not math.isfinite(value):
                    yield Problem(path, "expected a finite number")
            case None | int():
                pass
            case _ if depth > limits.depth:
                yield Problem(path, f"expected nesting of at most {limits.depth}")
            # Inside free-form values the path stops growing: their keys are content.
            case dict():
                pending.extend((path, depth + 1, key) for key in value)
                pending.extend((path, depth + 1, item) for item in value.values())
            case list():
                pending.extend((path, depth + 1, item) for item in value)
            case tuple():
                pending.extend((f"{path}.{index}", depth + 1, item) for index, item in enumerate(value))
            case BaseModel():
                pending.extend((f"{path}.{name}".lstrip("."), depth + 1, item) for name, item in value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
