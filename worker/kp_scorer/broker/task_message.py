"""What a message to the task holds, when it may hold anything."""

import json
from contextlib import suppress
from typing import Any, Final

from kp_scorer.decision import Decision
from kp_scorer.decoding import Limits, check_values, decode_json
from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.store import DeadLetters
from kp_scorer.trace import is_trace_id

TASK_NAME: Final = "score_trace"

_VALUES_AROUND: Final = 100
"""What the body of a task message has besides the trace: its lists of arguments, and what Celery says of callbacks."""

DELIVERY_COUNT: Final = "x-delivery-count"
"""The header in which RabbitMQ, and our Redis transport, say how often a message was delivered before."""


def bury_poison(dead_letters: DeadLetters, message: Any, deliveries: int, limits: Limits) -> Decision | None:
    """Keep a kombu message that was delivered ``deliveries`` times in vain.

    Returns:
        The decision on this very submission, if there is one: then nothing is kept.

    Raises:
        ServiceUnavailable: Redis cannot be reached; the message must be given back, not acknowledged.
    """
    payload = submission_in(raw_body(message), limits)
    trace_id, digest = checked_id(message.headers.get("id")), b""
    with suppress(InvalidTrace):
        trace = decode_json(payload, limits)
        trace_id, digest = trace.id, trace.digest()
    detail = f"delivered {deliveries} times, and no worker came to an end with it"
    return dead_letters.bury(payload, "poison", detail, trace_id, digest, deliveries)


def largest_message_bytes(limits: Limits) -> int:
    """How large a message may be to be parsed, in bytes.

    A valid submission can be 8 times the limit, as escaped JSON within JSON in base64; and what is somewhat too large is still
    worth a dead letter that says so.
    """
    return 16 * limits.message_bytes + 65_536


def check_body(body: bytes, limits: Limits) -> None:
    """Look whether the body of a task message may be parsed, before memory is used on it.

    Raises:
        InvalidTrace: it is too large, or has more values than a trace may have.
    """
    largest_bytes = largest_message_bytes(limits)
    if len(body) > largest_bytes:
        raise InvalidTrace([Problem("$", f"expected at most {largest_bytes} bytes, got {len(body)}")])
    check_values(body, limits.values + _VALUES_AROUND)


def deliveries_by(headers: Any) -> int:
    """How often a message has been delivered, this time included, by its headers; 1 where no one counted."""
    count = headers.get(DELIVERY_COUNT)
    return count + 1 if isinstance(count, int) else 1


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


def submission_in(body: bytes, limits: Limits) -> bytes:
    """The submission in the body of a task message; the body as it is if there is none, or if it may not be parsed."""
    try:
        check_body(body, limits)
        decoded = json.loads(body)
        args, kwargs = (decoded["args"], decoded["kwargs"]) if isinstance(decoded, dict) else decoded[:2]
        return as_bytes(only_argument(args, kwargs))
    except (ValueError, TypeError, LookupError, RecursionError, InvalidTrace):
        return body


def trace_id_of(payload: Any) -> str:
    """The id of a submission that may be anything; empty unless it is one."""
    return checked_id(payload.get("id")) if isinstance(payload, dict) else ""


def checked_id(value: object) -> str:
    """The value if it is a trace id, else an empty string."""
    return value if is_trace_id(value) else ""
