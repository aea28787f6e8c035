"""What comes from RabbitMQ, made harmless before py-amqp and kombu look at it."""

from collections.abc import Callable
from dataclasses import dataclass
from struct import pack_into, unpack_from
from typing import Any, Final

from amqp import method_framing
from amqp.serialization import decode_properties_basic

from kp_scorer.broker.task_body import BEGINNING_BYTES, leave_packed

_CONTENT_HEADER: Final = 2
_CONTENT_BODY: Final = 3
_BODY_SIZE_AT: Final = 4
_BEFORE_PROPERTIES: Final = 12
_NO_PROPERTIES: Final = b"\0\0"

Frame = tuple[int, int, bytes]


@dataclass
class _TooLarge:
    """A message of which only the beginning is kept while the rest passes by."""

    missing_bytes: int
    beginning: bytes = b""

    def receive(self, part: bytes) -> None:
        self.missing_bytes -= len(part)
        self.beginning += part[: BEGINNING_BYTES - len(self.beginning)]


def frame_handler(connection: Any, callback: Callable[..., Any], *, largest_bytes: int) -> Callable[[Frame], bool]:
    """Make py-amqp's own handler of frames, for the option ``frame_handler`` of its connections.

    No body is unpacked, or converted from the encoding that its producer names. Properties that py-amqp cannot read are taken
    for none: it would raise an error in every worker that gets the message, from where none can acknowledge it. Of a body over
    ``largest_bytes`` only the beginning is delivered, without properties, so that it is not taken for the whole: py-amqp would
    join as much as RabbitMQ lets anyone send.
    """

    def deliver(channel: int, method: Any, arguments: Any, message: Any) -> Any:
        if message is not None:
            # Some encodings take quadratic time, and what comes out of others are not the bytes that came.
            message.properties.pop("content_encoding", None)
            leave_packed(message.properties.get("application_headers", {}))
        return callback(channel, method, arguments, message)

    handle = method_framing.frame_handler(connection, deliver)
    # By channel, each of which gets one message after the other.
    too_large: dict[int, _TooLarge] = {}

    def handle_harmless(frame: Frame) -> bool:
        kind, channel, payload = frame
        if kind == _CONTENT_HEADER:
            (body_bytes,) = unpack_from(">Q", payload, _BODY_SIZE_AT)
            if body_bytes > largest_bytes:
                too_large[channel] = _TooLarge(body_bytes)
                payload = _header(payload, BEGINNING_BYTES)
            elif not _are_readable(payload):
                payload = _header(payload, body_bytes)
        elif kind == _CONTENT_BODY and channel in too_large:
            message = too_large[channel]
            message.receive(payload)
            if message.missing_bytes > 0:
                return False
            payload = too_large.pop(channel).beginning
        return bool(handle((kind, channel, payload)))

    return handle_harmless


def _header(payload: bytes, body_bytes: int) -> bytes:
    """The header of a content, but with this size and without properties."""
    header = bytearray(payload[:_BEFORE_PROPERTIES] + _NO_PROPERTIES)
    pack_into(">Q", header, _BODY_SIZE_AT, body_bytes)
    return bytes(header)


def _are_readable(payload: bytes) -> bool:
    try:
        decode_properties_basic(payload, _BEFORE_PROPERTIES)
    except Exception:
        # A text that is not UTF-8, a time beyond the calendar, tables nested deeper than Python can recurse: any of many.
        return False
    return True
