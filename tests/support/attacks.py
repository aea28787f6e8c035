"""The messages of an attacker who may only put messages on the queue of traces.

Each message holds a marker that must not be quoted. The attacks reach the queue of either broker past every check of ours and
of Celery's.
"""

import base64
import bz2
import json
import lzma
import pickle
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import cycle, product
from struct import pack
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import amqp
import redis
from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.broker.wire import TASK_NAME

from tests.support.arena import Arena
from tests.support.processes import PATIENCE_S
from tests.support.rabbitmq import confirming
from tests.support.traces import short_traces


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MARKER: Final = "Xylophonia"
GZIP: Final = "application/x-gzip"
"""Celery's name for the compression of zlib."""

MEGABYTE: Final = 1_000_000
ELSEWHERE: Final = "payments"
"""A queue that workers have no business with."""

_SIGNATURE: Final = {
    "task": f"pay.{MARKER}",
    "args": [MARKER],
    "kwargs": {},
    "options": {"queue": ELSEWHERE, "task_id": MARKER},
    "subtask_type": None,
    "immutable": True,
}
_LATER: Final = "2099-01-01T00:00:00+00:00"
_LONG_AGO: Final = "2001-01-01T00:00:00"
VALUES: Final[tuple[Any, ...]] = (
    *(None, False, 0, 1_000, 2**62, f"{MARKER}\n\x1b[31m{MARKER * 100}", _LATER, _LONG_AGO),
    *([1], [MARKER, 1], [_SIGNATURE], [[_SIGNATURE] * 3], {MARKER: MARKER}, _SIGNATURE),
    {"__type__": "datetime", "__value__": MARKER},
)
HEADERS: Final = (
    PACKED_BY,
    *_words("""
    lang id root_id parent_id group group_index meth shadow eta expires retries timelimit argsrepr kwargsrepr origin
    ignore_result replaced_task_nesting stamped_headers stamps utc args kwargs callbacks errbacks chain chord link taskset
    hostname is_eager called_directly reply_to correlation_id delivery_info redelivered x-delivery-count x-death priority
    headers properties loglevel logfile message received_s ticket clock content-type content_encoding sent_ms traceparent
    tracestate
    """),
)
_EMBED: Final = ("callbacks", "errbacks", "chain", "chord", "link", "message", "delivery_info", "ignore_result", "id")
_OLD_FIELDS: Final = _words("""
    id retries eta expires utc timelimit taskset group chord callbacks errbacks shadow root_id parent_id meth argsrepr
    kwargsrepr origin headers chain ignore_result
""")
TASKS: Final = ("", MARKER, f"pay.{MARKER}", "celery.backend_cleanup", "celery.chain", [TASK_NAME], {TASK_NAME: 1}, None, 5)
TYPES: Final = ("application/x-python-serialize", "application/data", "application/x-yaml", "text/plain", MARKER, "")
ENCODINGS: Final = ("bz2_codec", "zlib_codec", "punycode", "utf-16", "unicode_escape", "idna", "rot13", "base64", MARKER)


REDIS_PROPERTIES: Final = _words("""
    correlation_id reply_to delivery_mode delivery_info priority delivery_tag type message_id expiration timestamp
    content_type headers
""")
_NOT_UTF8: Final = b"\xff\xfe"
_BOMB_BYTES: Final = 2**28
_BOMB_PIECES: Final = 64


class Attack(NamedTuple):
    trace_id: str
    """The trace that is decided in spite of the attack; empty if the message must become a dead letter."""
    body: bytes
    headers: dict[str, Any]
    properties: Mapping[str, Any] = MappingProxyType({})
    content_type: Any = "application/json"
    content_encoding: Any = "utf-8"
    dead_id: str = ""
    """The trace that dies by the message.

    A body that is too costly to parse counts for the id in its headers, if there is one.
    """


def attacks() -> Iterator[Attack]:
    """Yield all attacks that both brokers can carry."""
    traces = marked(5_000, seed=11)
    for make in (_odd_values, _odd_contents, _packed, _calls, bare):
        yield from make(traces)


def plain() -> Iterator[Attack]:
    """Yield well-formed messages, which can be turned into attacks."""
    return (_attack(trace, {}) for trace in marked(1_000, seed=12))


def marked(count: int, seed: int) -> Iterator[dict[str, Any]]:
    return map(_with_marker, short_traces(count, seed))


def squatting(trace: dict[str, Any]) -> Attack:
    """Return an attack that submits other content under the id of another producer's trace."""
    return _attack(_with_marker({**trace, "task": {"objective": "mine"}}), {})._replace(trace_id="")


def _with_marker(trace: dict[str, Any]) -> dict[str, Any]:
    trace["task"]["objective"] += f" {MARKER}"
    return trace


Traces = Iterator[dict[str, Any]]


def _odd_values(traces: Traces) -> Iterator[Attack]:
    for name, value in product(HEADERS, VALUES):
        yield _attack(next(traces), {name: value})
    for embed in (*({name: value} for name, value in product(_EMBED, VALUES)), *VALUES):
        yield _attack(next(traces), {}, embed=embed)
    # In the first version of Celery's protocol these fields are in the body.
    for name, value in product(_OLD_FIELDS, VALUES):
        trace = next(traces)
        fields = {"task": TASK_NAME, "id": str(trace["id"]), "args": [trace], "kwargs": {}, name: value}
        yield Attack(str(trace["id"]), json.dumps(fields).encode(), {})


def _odd_contents(traces: Traces) -> Iterator[Attack]:
    for content_type in TYPES:
        yield _attack(next(traces), {})._replace(trace_id="", content_type=content_type)
    for encoding in ENCODINGS:
        yield _attack(next(traces), {})._replace(content_encoding=encoding)
    bodies = (pickle.dumps([[MARKER], {}, {}]), MARKER.encode(), b"\xff\xfe" + MARKER.encode("utf-16-le"))
    for body in (*bodies, f"[[1], {MARKER!r}, {{}}]".encode()):
        yield _attack(next(traces), {})._replace(trace_id="", body=body)
    for body in (b"[" * 100_000, b"9" * 5_000):
        yield _refused(_attack(next(traces), {})._replace(body=body))
    # The body is larger than that of any valid trace.
    yield _refused(_attack(next(traces) | {"mood": MARKER * 500_000}, {}))


def _packed(traces: Traces) -> Iterator[Attack]:
    attack = _attack(next(traces), {"compression": GZIP})
    yield attack._replace(body=zlib.compress(attack.body))
    yield attack._replace(trace_id="", body=zlib.compress(attack.body)[:-10])
    # Workers rename the header ``compression`` to this when they receive a message, and drop what a producer sends under the
    # name.
    gzip = {PACKED_BY: GZIP}
    yield _attack(next(traces), gzip)
    alone = _attack(next(traces), gzip)
    yield alone._replace(trace_id="", body=zlib.compress(alone.body))
    for packed_by in (GZIP, "brotli", [MARKER]):
        beside = _attack(next(traces), {"compression": GZIP, PACKED_BY: packed_by})
        yield beside._replace(body=zlib.compress(beside.body))
    for compression in (GZIP, "application/x-bz2", "application/x-lzma", "brotli", MARKER, [MARKER], 5):
        bomb = bombs().get(str(compression), MARKER.encode())
        attack = _attack(next(traces), {"compression": compression})._replace(body=bomb)
        attack = _refused(attack) if compression == GZIP else attack._replace(trace_id="")
        yield attack
        yield attack._replace(headers={**attack.headers, "shadow": [1], "ignore_result": False})
    for name, bomb in bombs().items():
        codec = {GZIP: "zlib_codec", "application/x-bz2": "bz2_codec"}.get(name, "punycode")
        yield _attack(next(traces), {})._replace(
            trace_id="", body=bomb, content_type="application/data", content_encoding=codec
        )


def _calls(traces: Traces) -> Iterator[Attack]:
    """Yield calls that ask for a result by an id like Celery's or by others, calls of other tasks, and one call many times."""
    for task_id in (str(uuid.uuid4()), "order-17", str(uuid.uuid4()).upper()):
        yield _attack(next(traces), {"id": task_id, "ignore_result": False})
    for task in TASKS:
        yield _attack(next(traces), {"task": task})._replace(trace_id="")
    yield from [_attack(next(traces), {})] * 40


def bare(traces: Traces) -> Iterator[Attack]:
    """Yield bodies that are traces or look like one, and do not call a task."""
    beside = ("args", "kwargs", "body", "properties", "__type__", "@graph", *_OLD_FIELDS)
    for name, value in zip(beside, cycle(VALUES), strict=False):
        yield _bare({name: value, **next(traces)})
    for headers in ({"id": str(uuid.uuid4()), "ignore_result": False}, {"callbacks": [_SIGNATURE]}, {"args": [MARKER]}):
        yield _bare(next(traces))._replace(headers=headers)
    for field in ("@type", "@context", "task", "metadata"):
        yield _refused(_bare({**next(traces), field: [MARKER]}))
    for body in ({MARKER: MARKER}, {"trace": {MARKER: 1}}, {"@type": MARKER, "args": [{}], "kwargs": {}, "task": TASK_NAME}):
        yield Attack("", json.dumps(body).encode(), {})
    for item in ("{}", "9" * 5_000, f'"{MARKER}"'):
        yield Attack("", f'{{"{MARKER}":[{",".join([item] * (MEGABYTE // len(item)))}]}}'.encode(), {})


def _attack(trace: dict[str, Any], headers: dict[str, Any], embed: Any = None) -> Attack:
    body = json.dumps([[trace], {}, embed]).encode()
    return Attack(str(trace["id"]), body, {"task": TASK_NAME, "id": str(trace["id"]), **headers})


def _bare(trace: dict[str, Any]) -> Attack:
    # Dead letters hold a bare trace in the same form.
    return Attack(str(trace["id"]), json.dumps(trace, ensure_ascii=False).encode(), {})


def _refused(attack: Attack) -> Attack:
    return attack._replace(trace_id="", dead_id=attack.trace_id)


@cache
def bombs() -> dict[str, bytes]:
    """Return bodies of some hundred kilobytes that unpack to a quarter of a gigabyte, by Celery's name of the compression."""
    piece = b"[" * (_BOMB_BYTES // _BOMB_PIECES)
    return {
        GZIP: zlib.compress(piece * _BOMB_PIECES, 1),
        "application/x-bz2": bz2.compress(piece, 1) * _BOMB_PIECES,
        "application/x-lzma": lzma.compress(piece, preset=0) * _BOMB_PIECES,
    }


Put = Callable[[Attack], None]


@contextmanager
def open_queue(arena: Arena) -> Iterator[Put]:
    """Yield a function that puts an attack on the queue of traces."""
    queue = arena.settings().queues.first
    if arena.broker == "redis":
        with redis.Redis.from_url(arena.producer_url, socket_timeout=PATIENCE_S) as client:
            yield lambda attack: client.lpush(queue, _item(attack)) and None
        return
    with confirming(arena.producer_url) as connection, connection.channel() as channel:
        yield lambda attack: channel.basic_publish(_message(attack), exchange=queue, routing_key=queue)


def broker_attacks(arena: Arena, harmless: Iterator[Attack]) -> Iterator[Attack]:
    """Yield the messages that only one of the brokers can carry."""
    if arena.broker == "redis":
        for name, value in product(REDIS_PROPERTIES, VALUES):
            yield next(harmless)._replace(properties={name: value})
        for attack in bare(marked(1_000, seed=14)):
            yield attack._replace(headers={}, properties={"no envelope": True})
        return
    names = ("correlation_id", "reply_to", "message_id", "type", "app_id")
    for name, value in product(names, (MARKER, f"{MARKER}\n\x1b[31m", "payments", "celery", "")):
        yield next(harmless)._replace(properties={name: value})
    yield from (next(harmless)._replace(properties={"priority": priority, "timestamp": 2**63}) for priority in (0, 9, 255))
    yield from (next(harmless)._replace(trace_id="", headers={}, properties={"raw": raw}) for raw in _unreadable_properties())


def _item(attack: Attack) -> bytes | str:
    if "no envelope" in attack.properties:
        return attack.body
    envelope = {
        "body": base64.b64encode(attack.body).decode(),
        "content-type": attack.content_type,
        "content-encoding": attack.content_encoding,
        "headers": attack.headers,
        "properties": {"body_encoding": "base64", "delivery_tag": "1", **attack.properties},
    }
    return json.dumps(envelope)


class _Raw(amqp.Message):  # type: ignore[misc]  # amqp ships no types
    """A message whose properties are raw bytes, which py-amqp would not write."""

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
    """Yield properties that RabbitMQ accepts, and that py-amqp cannot read."""
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
