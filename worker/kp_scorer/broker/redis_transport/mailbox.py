"""What comes to the mailbox of remote control by Redis' publish and subscribe: to all workers at once, from anyone."""

import json
from typing import Final

import structlog

from kp_scorer.broker.redis_transport.envelope import opened

LARGEST_REQUEST_BYTES: Final = 65_536
"""Of the body of a message in the mailbox."""

_LARGEST_BYTES: Final = 2 * LARGEST_REQUEST_BYTES
"""Of the whole message: a body in base64 is a third larger, and the rest is small."""

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
        body = opened(published).body.decode("utf-8")
    except Exception as error:
        # One of the many things that no message is.
        log.warning("control_message_ignored", detail=type(error).__name__)
        return b""
    properties = {"delivery_tag": "", "delivery_info": {}}
    envelope = {"body": body, "content-type": "application/json", "content-encoding": "utf-8", "properties": properties}
    return json.dumps(envelope).encode()
