"""What comes by Redis' publish and subscribe, to all workers at once, from anyone."""

import base64
import json
from typing import Final

import structlog

_LARGEST_BYTES: Final = 131_072

log = structlog.get_logger("kp_scorer.broker.redis_transport")


def only_its_body(published: bytes) -> bytes:
    """Make the envelope that kombu expects around the body of a published message, and around nothing else of it.

    Kombu would decompress as the headers say, and let its errors about what is missing end the worker.

    Returns:
        The envelope; empty, which kombu passes over, if this is no message.
    """
    try:
        if len(published) > _LARGEST_BYTES:
            raise ValueError("too large")
        message = json.loads(published)
        body = message["body"]
        if message["properties"].get("body_encoding") == "base64":
            body = base64.b64decode(body, validate=True).decode()
        if not (body and isinstance(body, str)):
            raise ValueError("no body")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        log.warning("broadcast_ignored", detail=type(error).__name__)
        return b""
    properties = {"delivery_tag": "", "delivery_info": {}}
    envelope = {"body": body, "content-type": "application/json", "content-encoding": "utf-8", "properties": properties}
    return json.dumps(envelope).encode()
