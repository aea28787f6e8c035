"""A worker that dies, errs or stalls where a test wants it to, and whose clock may be wrong.

``CRASH_AT`` names a point and ``CRASH_AFTER`` how often it is passed before the process kills itself there:

    moved       messages of the intake queue lie on the queue of traces, and still on the other (RabbitMQ only)
    taken       a message has come out of the broker, and nothing has been done with it
    embedding   vectors are being made
    placed      the traces of a batch have their places in the log, and no decisions
    committed   the decisions of a batch are stored, and none is published
    published   a decision is published, and its message not acknowledged
    buried      a dead letter is kept, and its message not acknowledged

With ``DELIVERED_TWICE`` each message is put on the queue once more when the process meets it for the first time, as if the
broker delivered everything twice. ``CLOCK_OFFSET_S`` moves what the process takes for the time, and ``EMBED_S`` is how long a
batch takes to embed. Words in a trace's objective do the rest; see below.
"""

# ruff: noqa: E402  # the clock is moved before others can take the right one

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
from kp_scorer.broker import intake
from kp_scorer.broker.publishing import with_producer
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.task_body import raw_body
from kp_scorer.broker.task_message import as_sent
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.process import consumer
from kp_scorer.process.consumer import KeepingConsumer
from kp_scorer.store import DeadLetters, RedisLedger

from tests.support.fast_worker import WordHashEmbedder, run

BREAKS = "breaks-the-batch"
"""Texts with this word cannot be embedded."""

KILLS = "kills-the-worker"
"""A text with this word kills the worker that embeds it."""

PANICS = "panics-in-the-task"
"""A text with this word takes all memory from the consumer, the first time that a process meets it; the second time it raises
what is no Exception, where it is decoded."""

STALLS = "stalls-the-batch"
"""A text with this word takes ``STALL_S`` seconds, the first time that a process meets it."""


class NativePanicError(BaseException):
    """What a native library raises that is no Exception."""


class CrashPoint:
    """A place in the flow where the process dies when it passes for the n-th time."""

    def __init__(self, name: str) -> None:
        self._left = int(os.environ.get("CRASH_AFTER", "1")) if os.environ.get("CRASH_AT") == name else 0
        self._lock = threading.Lock()

    def passed(self) -> None:
        """Pass it, or die."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class TroubledEmbedder(WordHashEmbedder):
    """Hashed words, with trouble."""

    _stalled = False

    def embed(self, texts: Sequence[str]) -> Vectors:
        words = {word for text in texts for word in text.split()}
        if KILLS in words:
            os.kill(os.getpid(), signal.SIGKILL)
        if BREAKS in words:
            raise ValueError(f"no vector for {texts}")
        if STALLS in words and not self._stalled:
            self._stalled = True
            time.sleep(float(os.environ["STALL_S"]))
        time.sleep(float(os.environ.get("EMBED_S", "0")))
        vectors = super().embed(texts)
        _EMBEDDING.passed()
        return vectors


_MOVED, _TAKEN, _EMBEDDING, _PLACED, _COMMITTED, _PUBLISHED, _BURIED = map(
    CrashPoint, ("moved", "taken", "embedding", "placed", "committed", "published", "buried")
)
_TAKING_COMMANDS = ("BRPOP", "BLMOVE", "EVAL")


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, around(getattr(owner, name)))


def _move(confirmed: Callable[..., Any]) -> Callable[..., Any]:
    def move_or_die(*args: Any) -> Any:
        moved = confirmed(*args)
        _MOVED.passed()
        return moved

    return move_or_die


def _take_from_redis(parse_response: Callable[..., Any]) -> Callable[..., Any]:
    def parse(self: Any, connection: Any, command: str, **options: Any) -> Any:
        reply = parse_response(self, connection, command, **options)
        # Only kombu's channel names the command it waits for; a message comes as a list, or as itself.
        if command in _TAKING_COMMANDS and isinstance(reply, bytes | list) and reply:
            _TAKEN.passed()
        return reply

    return parse


def _take_from_rabbitmq(deliver: Callable[..., Any]) -> Callable[..., Any]:
    def deliver_or_die(*args: Any) -> Any:
        _TAKEN.passed()
        return deliver(*args)

    return deliver_or_die


def _commit(commit: Callable[..., Any]) -> Callable[..., Any]:
    def commit_or_die(*args: Any) -> Any:
        _PLACED.passed()
        stands = commit(*args)
        _COMMITTED.passed()
        return stands

    return commit_or_die


def _publish(publish: Callable[..., Any]) -> Callable[..., Any]:
    def publish_or_die(self: Any, publications: Sequence[Any]) -> Any:
        errors = publish(self, publications)
        for _ in publications:
            _PUBLISHED.passed()
        return errors

    return publish_or_die


def _bury(bury: Callable[..., Any]) -> Callable[..., Any]:
    def bury_or_die(*args: Any, **kwargs: Any) -> Any:
        decision = bury(*args, **kwargs)
        _BURIED.passed()
        return decision

    return bury_or_die


def _run_out_of_memory(take: Callable[..., Any]) -> Callable[..., Any]:
    met = set[str]()

    def take_or_fail(message: Any, *args: Any) -> Any:
        if PANICS.encode() in raw_body(message) and message.headers["id"] not in met:
            met.add(message.headers["id"])
            raise MemoryError
        return take(message, *args)

    return take_or_fail


def _panic(decode: Callable[..., Any]) -> Callable[..., Any]:
    met = set[str]()

    def decode_or_panic(*args: Any) -> Any:
        trace = decode(*args)
        if PANICS in trace.task.objective.split() and trace.id not in met:
            met.add(trace.id)
            raise NativePanicError
        return trace

    return decode_or_panic


def _deliver_twice(handle: Callable[..., Any]) -> Callable[..., Any]:
    met = set[str]()

    def copy_and_handle(self: Any, *args: Any) -> Any:
        message = args[-1]
        if message.headers["id"] not in met:
            met.add(message.headers["id"])
            headers, queue = as_sent(message.headers), message.delivery_info["routing_key"]
            sent = {"content_type": message.content_type, "content_encoding": "utf-8", "headers": headers}
            with_producer(self.app, "copy", lambda producer: producer.publish(raw_body(message), routing_key=queue, **sent))
        return handle(self, *args)

    return copy_and_handle


def main() -> None:
    """Run the worker until it is told to stop, or dies."""
    _wrap(intake, "confirmed", _move)
    _wrap(redis.Redis, "parse_response", _take_from_redis)
    _wrap(amqp.channel.Channel, "_on_basic_deliver", _take_from_rabbitmq)
    _wrap(RedisLedger, "commit", _commit)
    _wrap(Publisher, "publish_all", _publish)
    _wrap(DeadLetters, "bury", _bury)
    _wrap(consumer, "task_in", _run_out_of_memory)
    _wrap(consumer, "decode_trace", _panic)
    if "DELIVERED_TWICE" in os.environ:
        _wrap(KeepingConsumer, "_handle_or_keep", _deliver_twice)
    run(TroubledEmbedder)


if __name__ == "__main__":
    main()
