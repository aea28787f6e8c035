"""Reads the headers of messages: the deliveries so far, the form of the body, and the time of sending."""

import re
from collections.abc import Mapping
from typing import Any, Final

from kp_scorer.store.keys import KEPT_S

DELIVERY_COUNT: Final = "x-delivery-count"  # The deliveries before this one, as RabbitMQ and our Redis transport count them.
SENT_MS: Final = "sent_ms"  # The Unix time when our client sent a message, by its own clock. No score depends on it.
# The time when RabbitMQ received a message, if ``message_interceptors.incoming.set_header_timestamp`` is on.
_STAMPED_MS: Final = "timestamp_in_ms"
PACKED_BY: Final = "x-packed-by"  # The compression of a body, once a message is received.
_PACKED_BY_PRODUCER: Final = "compression"
_LATEST_MS: Final = 2**53
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def leave_packed(headers: dict[str, Any]) -> None:
    """Rename the header by which kombu 5.7.0 would unpack a message at once, however large it becomes."""
    # Remove our header if the producer wrote it, because then it does not describe the body.
    headers.pop(PACKED_BY, None)
    if _PACKED_BY_PRODUCER in headers:
        headers[PACKED_BY] = headers.pop(_PACKED_BY_PRODUCER)


def result_id(message: Any) -> str:
    """Return the id of the Celery task whose result a message's producer waits for; empty if it waits for none."""
    # Only a UUID counts, which Celery uses: with any other id, a producer could forge the results of other calls.
    task_id = message.headers.get("id")
    # If its caller does not choose, Celery 5.7 sends null, and 5.1 to 5.6 send false; older versions omit this header.
    ignored = message.headers.get("ignore_result", True)
    is_wanted = (ignored is False or ignored is None) and isinstance(task_id, str)
    return task_id if is_wanted and _UUID.fullmatch(task_id) else ""


def headers_as_sent(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers of a message as its producer wrote them, without the count of deliveries."""
    names = {PACKED_BY: _PACKED_BY_PRODUCER}
    return {names.get(name, name): value for name, value in headers.items() if name != DELIVERY_COUNT}


def deliveries_by(message: Any) -> int:
    """Return the number of deliveries of a kombu message, this one included; 1 if nobody counted."""
    # On the first delivery, RabbitMQ leaves in place a count that the producer may have written.
    if not message.delivery_info.get("redelivered"):
        return 1
    count = message.headers.get(DELIVERY_COUNT)
    return count + 1 if isinstance(count, int) else 1


def note_sent(headers: dict[str, Any], timestamp_s: object) -> None:
    """Note in the headers of a message from RabbitMQ when it was sent, if RabbitMQ or its producer stamped it."""
    if isinstance(timestamp_s, int):
        headers.setdefault(_STAMPED_MS, timestamp_s * 1_000)
    if _STAMPED_MS in headers:
        headers.setdefault(SENT_MS, headers[_STAMPED_MS])


def sent_ms_in(headers: Mapping[str, Any]) -> int | None:
    """Return when a message was sent, in Unix milliseconds, by its header; None if that is missing or makes no sense."""
    sent_ms = headers.get(SENT_MS)
    return sent_ms if type(sent_ms) is int and 0 < sent_ms < _LATEST_MS else None


def queued_ms(message: Any, received_s: float) -> int | None:
    """Return the milliseconds that a message received at this Unix time had waited; None if nothing says when it was sent."""
    if (sent_ms := sent_ms_in(message.headers)) is None:
        return None
    waited_ms = round(received_s * 1_000) - sent_ms
    # A single absurd value would spoil every mean. If the producer's clock is ahead, the time is 0.
    return max(0, waited_ms) if abs(waited_ms) <= KEPT_S * 1_000 else None
