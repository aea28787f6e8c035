"""Publishes messages: batches that are confirmed as one, and submissions to the queue of traces.

The functions raise the errors of :mod:`~kp_scorer.broker.calls`, and ServiceUnavailable if Redis fails.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import amqp
from celery import Celery
from kombu import Producer, Queue
from kombu.transport import virtual

from kp_scorer.broker.calls import waiting, with_producer
from kp_scorer.broker.headers import SENT_MS
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.broker.rabbitmq import anew, confirming_channel
from kp_scorer.broker.wire import TASK_NAME, task_body
from kp_scorer.errors import NoQueue, QueueFull, ServiceUnavailable
from kp_scorer.spans import current_context

_TAKES_NO_MORE: Final = "RabbitMQ's queue {!r} takes no more for now, as when a policy limits its length"

T = TypeVar("T")


def portions(items: Sequence[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[Sequence[T]]:
    """Yield items in portions that are sent together. A portion ends with the item that brings it to ``most_bytes``."""
    start = size_bytes = 0
    for end, item in enumerate(items, 1):
        size_bytes += size_of(item)
        if size_bytes >= most_bytes:
            yield items[start:end]
            start, size_bytes = end, 0
    if start < len(items):
        yield items[start:]


class Outgoing(NamedTuple):
    """A message to be published: its UTF-8 JSON, its id and its headers."""

    body: bytes
    message_id: str
    headers: Mapping[str, Any] = MappingProxyType({})


def publish_all(
    app: Celery, purpose: str, queue: Queue, messages: Sequence[Outgoing], if_missing: Sequence[Queue] = ()
) -> list[bool]:
    """Publish persistent messages to a queue, in order and in one round trip; return once the broker has them.

    The result says of each message whether the queue accepted it: RabbitMQ refuses messages over a queue's limit, Redis refuses
    none. For ``purpose`` and ``if_missing`` see :func:`with_producer`. After an error some may be on the queue; publish all
    again.
    """
    if app.conf.broker_url.startswith("redis"):
        with_producer(app, purpose, lambda producer: producer.channel.publish_all(queue.name, messages))
        return [True] * len(messages)

    def publish_to_rabbitmq(producer: Producer) -> list[bool]:
        properties = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
        outgoing = [
            amqp.Message(body, message_id=message_id, application_headers=dict(headers), **properties)
            for body, message_id, headers in messages
        ]
        return publish_confirmed(producer, outgoing, queue)

    return with_producer(app, purpose, publish_to_rabbitmq, if_missing)


def publish_confirmed(producer: Producer, messages: Sequence[amqp.Message], queue: Queue) -> list[bool]:
    """Publish to a queue on RabbitMQ and wait for all confirms together; return for each whether the queue accepted it.

    Raises errors of py-amqp, which :func:`with_producer` handles.
    """
    channel = confirming_channel(producer.channel.connection)
    return channel.publish_all(messages, queue.exchange.name, queue.routing_key)


def send_traces(app: Celery, queues: SubmissionQueues, submissions: Sequence[tuple[str, bytes]]) -> None:
    """Publish submissions, pairs of id and JSON, to the queue of traces; if RabbitMQ has no such queue, declare what it needs.

    After an error some may have been sent.
    """
    headers = {**current_context(), "task": TASK_NAME, SENT_MS: int(time.time() * 1_000)}
    messages = [Outgoing(task_body(trace), trace_id, {**headers, "id": trace_id}) for trace_id, trace in submissions]
    if not all(publish_all(app, "submit", queues.traces, messages, if_missing=queues.in_order)):
        raise QueueFull(f"submit: {_TAKES_NO_MORE.format(queues.traces.name)}")


def check_room(app: Celery, queues: SubmissionQueues) -> None:
    """Raise QueueFull if a queue of traces is full, before the ledger notes submissions that the queue would refuse."""
    # On Redis nothing else enforces the limit, so clients that send at the same time may each exceed it by a batch.
    if queues.limit:
        with suppress(NoQueue):
            if waiting(app, queues.passive_traces) >= queues.limit:
                raise QueueFull(f"submit: {queues.traces.name!r} has {queues.limit} traces, as many as its limit allows")


def send_again(app: Celery, queue: Queue, message: Any) -> None:
    """Publish a message from RabbitMQ again, at the end of ``queue`` and as if it were new; then it may be acknowledged.

    After an error, the message stays where it is. After SettingsError, RabbitMQ refuses it in this form.
    """
    # The default exchange would also route the message to every queue that its producer named in a CC header.
    if not all(with_producer(app, "traces", lambda producer: publish_confirmed(producer, [anew(message)], queue))):
        raise ServiceUnavailable(f"traces: {_TAKES_NO_MORE.format(queue.name)}")


def acknowledge_all(messages: Sequence[Any]) -> None:
    """Acknowledge kombu messages; on Redis in one round trip for each channel."""
    tags: dict[Any, list[str]] = {}
    for message in messages:
        if isinstance(message.channel, virtual.Channel):
            tags.setdefault(message.channel, []).append(message.delivery_tag)
        else:
            message.ack()
    for channel, of_channel in tags.items():
        channel.qos.ack_all(of_channel)
