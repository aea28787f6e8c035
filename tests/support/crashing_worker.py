"""A worker that dies, errs or stalls where a test wants it to, and whose clock may be wrong.

``CRASH_AT`` names a point and ``CRASH_AFTER`` how often it is passed before the process kills itself there:

    moved       messages of the intake queue are on the queue of traces, and still on the other (RabbitMQ only)
    received    a message has been received from the broker, and nothing has been done with it
    embedding   vectors are being made
    placed      the traces of a batch have their places in the log, and no decisions
    committed   the decisions of a batch are stored, and none is published
    published   a decision is published, and its message not acknowledged
    dead        a dead letter is stored, and its message not acknowledged

With ``DELIVERED_TWICE`` each message is put on the queue once more when the process meets it for the first time, as if the
broker delivered everything twice. ``CLOCK_OFFSET_S`` moves the process's clock, and ``EMBED_S`` is how long a batch takes to
embed. Words in a trace's objective do the rest; see below.
"""

# ruff: noqa: E402  # the clock is moved before another module can keep the right one

import os
import time

_OFFSET_S = float(os.environ.get("CLOCK_OFFSET_S", "0"))
_true_time, _true_time_ns = time.time, time.time_ns
time.time = lambda: _true_time() + _OFFSET_S
time.time_ns = lambda: _true_time_ns() + int(_OFFSET_S * 1e9)

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

import amqp.channel
import redis
from kp_scorer.broker import dead_queue
from kp_scorer.broker.calls import with_producer
from kp_scorer.broker.headers import headers_as_sent
from kp_scorer.broker.redis_transport import queue
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.wire import raw_body
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.process import consumer
from kp_scorer.process.consumer import KeepingConsumer
from kp_scorer.store.dead_letters import DeadLetters
from kp_scorer.store.ledger import RedisLedger

from tests.support.fast_worker import Panic, WordHashEmbedder, run

BREAKS = "breaks-the-batch"
"""Texts with this word cannot be embedded."""

KILLS = "kills-the-worker"
"""A text with this word kills the worker that embeds it."""

PANICS = "panics-in-the-task"
"""The first time that a process receives a text with this word, the consumer runs out of memory.

The second time, decoding the text raises an error that is not an Exception.
"""

KILLS_READERS = "kills-whoever-reads-it"
"""A message with this word kills the worker that decodes it, before the ledger can note the message."""

STALLS = "stalls-the-batch"
"""The first time that a process embeds a text with this word, embedding takes ``STALL_S`` seconds."""


class CrashPoint:
    """A point in the flow at which the process dies once it has passed it often enough."""

    def __init__(self, name: str) -> None:
        self._left = int(os.environ.get("CRASH_AFTER", "1")) if os.environ.get("CRASH_AT") == name else 0
        self._lock = threading.Lock()

    def passed(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class TroubledEmbedder(WordHashEmbedder):
    _has_stalled = False

    def embed(self, texts: Sequence[str]) -> Vectors:
        words = {word for text in texts for word in text.split()}
        if KILLS in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if BREAKS in words:
            raise ValueError(f"no vector for {texts}")
        if STALLS in words and not self._has_stalled:
            self._has_stalled = True
            time.sleep(float(os.environ["STALL_S"]))
        vectors = super().embed(texts)
        _EMBEDDING.passed()
        return vectors


_MOVED, _RECEIVED, _EMBEDDING, _IN_LOG, _COMMITTED, _PUBLISHED, _DEAD = map(
    CrashPoint, ("moved", "received", "embedding", "placed", "committed", "published", "dead")
)

Function = Callable[..., Any]
_met: set[tuple[Function, str]] = set()


def _wrap(owner: Any, name: str, around: Function) -> None:
    """Replace a function of an object by a call of ``around``, which gets the function and its arguments."""
    function = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(function, *args, **kwargs)

    setattr(owner, name, call)


def _before(point: CrashPoint) -> Function:
    def die_or_call(function: Function, *args: Any, **kwargs: Any) -> Any:
        point.passed()
        return function(*args, **kwargs)

    return die_or_call


def _after(point: CrashPoint, times: Callable[..., int] = lambda result, *args: 1) -> Function:
    """Return a wrapper that passes a point after each call, as often as ``times`` says of the call's result and arguments."""

    def call_or_die(function: Function, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        for _ in range(times(result, *args)):
            point.passed()
        return result

    return call_or_die


def _is_first(function: Function, an_id: str) -> bool:
    """Return whether a function meets an id for the first time in this process."""
    is_first = (function, an_id) not in _met
    _met.add((function, an_id))
    return is_first


def _run_out_of_memory(parse: Function, message: Any, *args: Any) -> Any:
    if PANICS.encode() in raw_body(message) and _is_first(parse, message.headers["id"]):
        raise MemoryError
    return parse(message, *args)


def _panic(decode: Function, *args: Any) -> Any:
    trace = decode(*args)
    if KILLS_READERS in trace.task.objective.split():
        os.kill(os.getpid(), signal.SIGKILL)
    if PANICS in trace.task.objective.split() and _is_first(decode, trace.id):
        raise Panic
    return trace


def _deliver_twice(handle: Function, consumer: Any, *args: Any) -> Any:
    message = args[-1]
    if "id" in message.headers and _is_first(handle, message.headers["id"]):
        headers, queue = headers_as_sent(message.headers), message.delivery_info["routing_key"]
        sent = {"content_type": message.content_type, "content_encoding": "utf-8", "headers": headers}
        with_producer(consumer.app, "copy", lambda producer: producer.publish(raw_body(message), routing_key=queue, **sent))
    return handle(consumer, *args)


def main() -> None:
    _wrap(dead_queue, "publish_confirmed", _after(_MOVED))
    # BLMOVE has moved the message, but it is not noted as in flight yet.
    _wrap(redis.Redis, "parse_response", _after(_RECEIVED, lambda reply, _, __, command: command == "BLMOVE" and bool(reply)))
    _wrap(queue.receive, "parse", _after(_RECEIVED, lambda messages, _: bool(messages)))
    _wrap(amqp.channel.Channel, "_on_basic_deliver", _before(_RECEIVED))
    _wrap(RedisLedger, "commit", _before(_IN_LOG))
    _wrap(RedisLedger, "commit", _after(_COMMITTED))
    _wrap(Publisher, "publish_all", _after(_PUBLISHED, lambda errors, _, publications: len(publications)))
    _wrap(DeadLetters, "dead_letter", _after(_DEAD))
    _wrap(consumer, "arguments_in", _run_out_of_memory)
    for name in ("check_trace", "decode_trace"):
        _wrap(consumer, name, _panic)
    if "DELIVERED_TWICE" in os.environ:
        _wrap(KeepingConsumer, "_receive", _deliver_twice)
    run(TroubledEmbedder)


if __name__ == "__main__":
    main()
