"""The envelope in which kombu puts a message on Redis, when it may hold anything; and what comes without one."""

import base64
import json
from typing import Any, Final, NamedTuple

from kp_scorer.decoding import check_values
from kp_scorer.errors import InvalidTrace

_MOST_VALUES: Final = 1_000
"""Of an envelope: it has some forty, and its body is one of them."""


_OF_ENVELOPES: Final = frozenset({"body", "properties"})
"""What every envelope has."""


class Opened(NamedTuple):
    """What counts of a message on Redis."""

    content_type: str
    headers: dict[str, Any]
    body: bytes


def opened(item: bytes) -> Opened:
    """Take a message out of its envelope; a JSON object that is no envelope is a plain message, all of it the body.

    Raises any of many errors if an item is neither.
    """
    try:
        check_values(item, _MOST_VALUES)
    except InvalidTrace:
        # No envelope has so many values. Whether a plain message may have them, and is JSON, is looked at with its body.
        return _plain(item)
    message = json.loads(item.decode("utf-8"))
    if not isinstance(message, dict):
        raise TypeError("neither an envelope nor a plain message")
    # A trace may have any fields beside its own, but no envelope has a trace's type.
    if "@type" in message or not message.keys() >= _OF_ENVELOPES:
        return _plain(item)
    body, encoding = message["body"].encode("utf-8", "surrogatepass"), message["properties"].get("body_encoding")
    if not body or encoding not in (None, "", "base64"):
        raise ValueError("nothing in it but an envelope, or a body in an encoding that no one knows")
    if encoding == "base64":
        # By default what is no base64 would be skipped, and with it bytes lost.
        body = base64.b64decode(body, validate=True)
    return Opened(message["content-type"], {**(message.get("headers") or {})}, body)


def _plain(item: bytes) -> Opened:
    return Opened("application/json", {}, item)
