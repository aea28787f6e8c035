"""What a message to the task holds, when it may hold anything."""

import json
from typing import Any

from worker.errors import InvalidTrace, Problem
from worker.trace import TRACE_ID_PREFIX


def only_argument(args: Any, kwargs: Any) -> Any:
    """The trace among the arguments of a task: its only positional argument, or the one called ``trace``.

    Raises:
        InvalidTrace: there are other arguments, or none.
    """
    if len(args) == 1 and not kwargs:
        return args[0]
    if not args and list(kwargs) == ["trace"]:
        return kwargs["trace"]
    raise InvalidTrace([Problem("$", "expected the trace as the only argument of score_trace")])


def as_bytes(payload: Any) -> bytes:
    """A submission as the UTF-8 JSON that a dead letter keeps."""
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")


def raw_body(message: Any) -> bytes:
    """The body of a kombu message as it came."""
    body = message.body
    return body if isinstance(body, bytes) else str(body).encode("utf-8", "surrogatepass")


def submission_in(body: bytes, largest_bytes: int) -> bytes:
    """The submission in the body of a task message; the body as it is if there is none, or if it is too large to be parsed."""
    if len(body) > largest_bytes:
        return body
    try:
        decoded = json.loads(body)
        args, kwargs = (decoded["args"], decoded["kwargs"]) if isinstance(decoded, dict) else decoded[:2]
        return as_bytes(only_argument(args, kwargs))
    except (ValueError, TypeError, LookupError, RecursionError, InvalidTrace):
        return body


def trace_id_of(payload: Any) -> str:
    """The id of a submission that may be anything; empty unless it looks like one."""
    return checked_id(payload.get("id")) if isinstance(payload, dict) else ""


def checked_id(value: object) -> str:
    """The value if it looks like a trace id, else an empty string."""
    if isinstance(value, str) and value.startswith(TRACE_ID_PREFIX) and value.isascii() and len(value) <= 200:
        return value
    return ""
