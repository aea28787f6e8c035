"""The envelope in which kombu puts a message on Redis, when it may hold anything."""

import base64
import json
from typing import Any, Final, NamedTuple

from kp_scorer.decoding import check_values

_MOST_VALUES: Final = 1_000
"""Of an envelope: it has some forty, and its body is one of them."""


class Opened(NamedTuple):
    """What counts of a message in an envelope."""

    content_type: str
    headers: dict[str, Any]
    body: bytes


def opened(item: bytes) -> Opened:
    """Take a message out of its envelope; raises any of many errors if an item is none."""
    check_values(item, _MOST_VALUES)
    message = json.loads(item.decode("utf-8"))
    body, encoding = message["body"].encode("utf-8", "surrogatepass"), message["properties"].get("body_encoding")
    if not body or encoding not in (None, "", "base64"):
        raise ValueError("nothing in it but an envelope, or a body in an encoding that no one knows")
    if encoding == "base64":
        # By default what is no base64 would be skipped, and with it bytes lost.
        body = base64.b64decode(body, validate=True)
    return Opened(message["content-type"], {**(message.get("headers") or {})}, body)
