"""How attacks get onto the queue of either broker, past every check of ours and of Celery's."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import pack
from typing import Any, Final

import amqp

from tests.support.arena import Arena
from tests.support.attacks import MARKER, VALUES, Attack, bare, marked
from tests.support.rabbitmq import confirming

Put = Callable[[Attack], None]

_REDIS_PROPERTIES: Final = (
    *("correlation_id", "reply_to", "delivery_mode", "delivery_info", "priority", "delivery_tag", "type", "message_id"),
    *("expiration", "timestamp", "content_type", "headers"),
)
_NOT_UTF8: Final = b"\xff\xfe"


@contextmanager
def open_queue(arena: Arena) -> Iterator[Put]:
    """Give what puts an attack on the queue of traces."""
    queue = arena.settings().queues.traces
    if arena.broker == "redis":
        with arena.redis.connect() as client:
            yield lambda attack: client.lpush(queue, _item(attack)) and None
        return
    with confirming(arena.settings().broker.url) as connection, connection.channel() as channel:
        yield lambda attack: channel.basic_publish(_message(attack), routing_key=queue)


def broker_attacks(arena: Arena, plain: Iterator[Attack]) -> Iterator[Attack]:
    """What only one of the brokers can carry."""
    if arena.broker == "redis":
        for name in _REDIS_PROPERTIES:
            for value in VALUES:
                yield next(plain)._replace(properties={name: value})
        for attack in bare(marked(1_000, seed=14)):
            yield attack._replace(headers={}, properties={"no envelope": True})
        return
    for value in (MARKER, f"{MARKER}\n\x1b[31m", "payments", "celery", ""):
        for name in ("correlation_id", "reply_to", "message_id", "type", "app_id"):
            yield next(plain)._replace(properties={name: value})
    yield from (next(plain)._replace(properties={"priority": priority, "timestamp": 2**63}) for priority in (0, 9, 255))
    yield from (next(plain)._replace(trace_id="", headers={}, properties={"raw": raw}) for raw in _unreadable_properties())


def _item(attack: Attack) -> bytes | str:
    return attack.body if "no envelope" in attack.properties else _envelope(attack)


def _envelope(attack: Attack) -> str:
    properties = {"body_encoding": "base64", "delivery_tag": "1", **attack.properties}
    return json.dumps(
        {
            "body": base64.b64encode(attack.body).decode(),
            "content-type": attack.content_type,
            "content-encoding": attack.content_encoding,
            "headers": attack.headers,
            "properties": properties,
        }
    )


class _Raw(amqp.Message):  # type: ignore[misc]  # amqp ships no types
    """A message with properties that py-amqp would not write."""

    def _serialize_properties(self) -> bytes:
        raw: bytes = self.properties["raw"]
        return raw


def _message(attack: Attack) -> Any:
    if "raw" in attack.properties:
        return _Raw(attack.body, raw=attack.properties["raw"])
    return amqp.Message(
        attack.body,
        application_headers=attack.headers,
        content_type=attack.content_type,
        content_encoding=attack.content_encoding,
        **attack.properties,
    )


def _unreadable_properties() -> Iterator[bytes]:
    """Properties that RabbitMQ takes and py-amqp raises an error for."""
    for flag in (0x8000, 0x4000, 0x0400, 0x0200):
        yield pack(">HB", flag, len(_NOT_UTF8)) + _NOT_UTF8
    yield _headers(b"T" + pack(">Q", 2**63 - 1))
    nested = b"V"
    for _ in range(5_000):
        nested = b"A" + pack(">I", len(nested)) + nested
    yield _headers(nested)


def _headers(value: bytes) -> bytes:
    table = bytes([len(MARKER)]) + MARKER.encode() + value
    return pack(">HI", 0x2000, len(table)) + table
