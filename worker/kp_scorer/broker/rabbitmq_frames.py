"""What comes from RabbitMQ, made harmless before py-amqp and kombu look at it."""

from collections.abc import Callable
from typing import Any, Final

from amqp import method_framing
from amqp.serialization import decode_properties_basic

from kp_scorer.broker.task_message import leave_packed

_CONTENT_HEADER: Final = 2
_BEFORE_PROPERTIES: Final = 12
_NO_PROPERTIES: Final = b"\0\0"

Frame = tuple[int, int, bytes]


def frame_handler(connection: Any, callback: Callable[..., Any]) -> Callable[[Frame], bool]:
    """Make py-amqp's own handler of frames, for the option ``frame_handler`` of its connections.

    No body is unpacked, or converted from the encoding that its producer names. Properties that py-amqp cannot read are taken
    for none: it would raise an error in every worker that gets the message, from where none can acknowledge it.
    """

    def deliver(channel: int, method: Any, arguments: Any, message: Any) -> Any:
        if message is not None:
            # Some encodings take quadratic time, and what comes out of others are not the bytes that came.
            message.properties.pop("content_encoding", None)
            leave_packed(message.properties.get("application_headers", {}))
        return callback(channel, method, arguments, message)

    handle = method_framing.frame_handler(connection, deliver)

    def handle_readable(frame: Frame) -> bool:
        kind, channel, payload = frame
        if kind == _CONTENT_HEADER and not _are_readable(payload):
            payload = bytes(payload[:_BEFORE_PROPERTIES]) + _NO_PROPERTIES
        return bool(handle((kind, channel, payload)))

    return handle_readable


def _are_readable(payload: bytes) -> bool:
    try:
        decode_properties_basic(payload, _BEFORE_PROPERTIES)
    except Exception:
        # A text that is not UTF-8, a time beyond the calendar, tables nested deeper than Python can recurse: any of many.
        return False
    return True
