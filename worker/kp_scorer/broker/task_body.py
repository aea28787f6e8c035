"""The body of a submission's message: how large it may be, how it is unpacked, and what our client puts around a trace."""

import zlib
from typing import Any, Final

from kp_scorer.decoding import Limits, check_values, least_bytes
from kp_scorer.errors import InvalidTrace, Problem

_VALUES_AROUND: Final = 100
"""What the body of a task message has besides the trace: its lists of arguments, and what Celery says of callbacks."""

_BYTES_AROUND: Final = 65_536
"""What it may have of bytes besides the trace."""

PACKED_BY: Final = "x-packed-by"
"""The header that says how a body is compressed, once a message is here."""

PACKED_BY_PRODUCER: Final = "compression"
"""The header by which its producer says so."""

_DEFLATE: Final = ("application/x-gzip", "gzip", "zlib")
"""What Celery calls the compression of zlib."""

BEGINNING_BYTES: Final = 65_536
"""How much is delivered of a message that is too large to be looked at."""

_BEFORE: Final = b"[["
_BEHIND: Final = b"], {}, {}]"
"""What the body of a call by our client has around its one argument."""


def task_body(argument: bytes) -> bytes:
    """The body of Celery's message that calls a task with one argument, which is UTF-8 JSON."""
    return _BEFORE + argument + _BEHIND


def argument_in(body: bytes) -> bytes:
    """The object that :func:`task_body` made a body of, without parsing it; a body of another form as it is.

    Should there be more arguments in that form, they are all in what is given, and are no JSON.
    """
    is_ours = body.startswith(_BEFORE + b"{") and body.endswith(b"}" + _BEHIND)
    return body[len(_BEFORE) : -len(_BEHIND)] if is_ours else body


def largest_message_bytes(limits: Limits) -> int:
    """How large a message may be to be looked at, in bytes.

    A valid submission can be 8 times the limit, as escaped JSON within JSON in base64; and what is somewhat too large is still
    worth a dead letter that says so.
    """
    return 16 * limits.message_bytes + _BYTES_AROUND


def largest_body_bytes(limits: Limits) -> int:
    """How large the body of a task message may be to be parsed, in bytes: JSON may write two bytes of UTF-8 as six."""
    return 4 * limits.message_bytes + _BYTES_AROUND


def leave_packed(headers: dict[str, Any]) -> None:
    """Rename the header by which kombu would unpack a message, however large it became, before anyone has looked at it."""
    # One that a producer wrote would not be what its message was sent with.
    headers.pop(PACKED_BY, None)
    if PACKED_BY_PRODUCER in headers:
        headers[PACKED_BY] = headers.pop(PACKED_BY_PRODUCER)


def raw_body(message: Any) -> bytes:
    """The body of a kombu message as it came."""
    # Py-amqp makes a text of one that is empty.
    return message.body.encode() if isinstance(message.body, str) else bytes(message.body)


def bounded_body(message: Any, limits: Limits) -> bytes:
    """The body of a message, unpacked and not parsed.

    Raises:
        InvalidTrace: it is too large to hold a valid trace, or has too many values.
        ValueError: it does not say that it is JSON, or cannot be unpacked.
    """
    body, packed_by = raw_body(message), message.headers.get(PACKED_BY)
    if message.content_type != "application/json":
        raise ValueError("content type: expected application/json")
    largest_bytes = largest_body_bytes(limits)
    if packed_by:
        body = _unpacked(body, packed_by, largest_bytes)
    most_bytes, most_values = limits.message_bytes + _BYTES_AROUND, limits.values + _VALUES_AROUND
    if len(body) > largest_bytes or (len(body) > most_bytes and least_bytes(body, most_values) > most_bytes):
        raise InvalidTrace([Problem("$", f"expected at most {limits.message_bytes} bytes")])
    check_values(body, most_values)
    return body


def _unpacked(body: bytes, packed_by: object, largest_bytes: int) -> bytes:
    """Unpack a body, one byte further than ``largest_bytes`` at most: it may be a thousand times its size."""
    if packed_by not in _DEFLATE:
        raise ValueError(f"compression: expected {_DEFLATE[0]}, or none")
    unpacking = zlib.decompressobj()
    try:
        unpacked = unpacking.decompress(body, largest_bytes + 1)
    except zlib.error:
        raise ValueError(f"compression: expected {_DEFLATE[0]}") from None
    if len(unpacked) <= largest_bytes and not unpacking.eof:
        raise ValueError("compression: expected all of the body")
    return unpacked
