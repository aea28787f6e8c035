"""Publish to the queues: on RabbitMQ confirmed and routed, on either broker with each step within ``broker.timeout_s``.

What talks to the broker raises ServiceUnavailable if the broker cannot be reached, has no such queue, refuses, or does not
confirm in time; and SettingsError if RabbitMQ has a queue of this name with other arguments.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import amqp
from amqp.exceptions import AccessRefused, AMQPError, NotFound, PreconditionFailed
from celery import Celery
from kombu import Producer, Queue
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.transport import virtual
from redis.exceptions import RedisError

from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.broker.rabbitmq import anew, confirming_channel
from kp_scorer.broker.wire import SENT_MS, TASK_NAME, task_body
from kp_scorer.errors import BrokerBlocked, NoQueue, QueueFull, ServiceUnavailable, SettingsError
from kp_scorer.ledger.connection import REFUSALS, Condition, condition_of, refusal
from kp_scorer.spans import current_context

_NO_ROUTE: Final = 312
_RETRY_PAUSES_S: Final = (0.1, 0.5)  # Before the second and the third attempt; then a worker's pipeline retries each second.
_NO_QUEUE: Final = "RabbitMQ has no queue {!r}, or no exchange that leads to it, and this user may not make it: start a worker"
_NOT_OURS: Final = "RabbitMQ has no queue {!r}: start a worker of the app that consumes it, which declares it"
_TAKES_NO_MORE: Final = "RabbitMQ's queue {!r} takes no more for now, as when a policy limits its length"

T = TypeVar("T")


def portions(items: Sequence[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[Sequence[T]]:
    """Divide items into those that are sent together: as many as have ``most_bytes`` with the last one."""
    start = size_bytes = 0
    for end, item in enumerate(items, 1):
        size_bytes += size_of(item)
        if size_bytes >= most_bytes:
            yield items[start:end]
            start, size_bytes = end, 0
    if start < len(items):
        yield items[start:]


def declare_queues(app: Celery, queues: Sequence[Queue]) -> None:
    """Declare the queues, in order."""
    with_producer(app, "queues", lambda producer: [queue(producer.channel).declare() for queue in queues])


def with_producer(app: Celery, purpose: str, use: Callable[[Producer], T], if_missing: Sequence[Queue] = ()) -> T:
    """Call ``use`` with a producer and return its result; if the broker or connection fails, retry on a new connection.

    The queues ``if_missing``, the last of which ``use`` works on, are declared only after RabbitMQ has refused because one is
    missing: not every user has the permission. A queue with ``no_declare`` belongs to another app; if it is missing, NoQueue
    is raised. ``use`` has to be safe to repeat.
    """
    declared: Sequence[Queue] = ()
    pauses = iter(_RETRY_PAUSES_S)
    while True:
        try:
            lent = app.producer_pool.acquire(block=True, timeout=app.conf.broker_pool_acquire_timeout)
        except LimitExceeded:
            raise ServiceUnavailable(f"{purpose}: all connections to the broker are in use") from None
        with lent as producer:
            connection = producer.connection
            try:
                for queue in declared:
                    queue(producer.channel).declare()
                return use(producer)
            except BrokerBlocked:
                # RabbitMQ reads nothing more on it.
                connection.collect()
                raise
            except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
                # Dropped, not closed: a late confirm would count as that of the next message on this channel, and
                # closing would wait for a peer that may be gone.
                connection.collect()
                cause = error.__cause__ or error
                if isinstance(cause, PreconditionFailed):
                    raise SettingsError(f"{purpose}: {error}; make the settings equal, or delete the queue") from error
                if isinstance(cause, AccessRefused) and declared:
                    raise ServiceUnavailable(f"{purpose}: {_NO_QUEUE.format(declared[-1].name)}") from error
                if isinstance(cause, NotFound) or getattr(cause, "reply_code", None) == _NO_ROUTE:
                    if if_missing and if_missing[-1].no_declare:
                        raise NoQueue(f"{purpose}: {_NOT_OURS.format(if_missing[-1].name)}") from error
                    declared = if_missing
                if (pause_s := next(pauses, None)) is None:
                    raise ServiceUnavailable(f"{purpose}: {described(error)}") from error
        time.sleep(pause_s)


@contextmanager
def unavailable_if_broker_fails(purpose: str) -> Iterator[None]:
    """Turn the broker's connection errors and refusals into ServiceUnavailable."""
    try:
        yield
    except (OperationalError, OSError, AMQPError, RedisError) as error:
        raise ServiceUnavailable(f"{purpose}: {described(error)}") from error


def described(error: Exception) -> str:
    """An error of the broker in words, without trace content."""
    # Kombu wraps errors that occur while it publishes.
    cause = error.__cause__ or error
    if isinstance(cause, REFUSALS):
        return f"the broker refuses: {refusal(cause)}"
    problem = f"cannot use the broker ({type(error).__name__}: {error})"
    is_unreached = isinstance(cause, OSError | RedisError)
    return f"{problem}; is it running where broker.url says?" if is_unreached else problem


class Outgoing(NamedTuple):
    """A message to be published: UTF-8 JSON and what goes with it."""

    body: bytes
    message_id: str
    headers: Mapping[str, Any] = MappingProxyType({})


def publish_all(
    app: Celery, purpose: str, queue: Queue, messages: Sequence[Outgoing], if_missing: Sequence[Queue] = ()
) -> list[bool]:
    """Put persistent messages on a queue, in order, and return once the broker has them, all in one round trip.

    It returns for each whether the queue accepted it: RabbitMQ refuses messages over the limit of a queue, Redis none. For
    ``purpose`` and ``if_missing`` see :func:`with_producer`. After an error some may be on the queue; publish all again.
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

    It raises errors of py-amqp, which :func:`with_producer` handles.
    """
    channel = confirming_channel(producer.channel.connection)
    # Its own timeout is broker.timeout_s.
    return channel.publish_all(messages, queue.exchange.name, queue.routing_key, producer.connection.connect_timeout)


def send_traces(app: Celery, queues: SubmissionQueues, submissions: Sequence[tuple[str, bytes]]) -> None:
    """Put submissions, each an id and JSON, on the queue of traces; if RabbitMQ has none, declare the queues of submissions.

    After an error some may have been sent.
    """
    headers = {**current_context(), "task": TASK_NAME, SENT_MS: int(time.time() * 1_000)}
    messages = [Outgoing(task_body(trace), trace_id, {**headers, "id": trace_id}) for trace_id, trace in submissions]
    if not all(publish_all(app, "submit", queues.traces, messages, if_missing=queues.in_order)):
        raise QueueFull(f"submit: {_TAKES_NO_MORE.format(queues.traces.name)}")


def send_again(app: Celery, queue: Queue, message: Any) -> None:
    """Put a message that came from RabbitMQ at the end of ``queue``, as one that was never delivered; to be acknowledged then.

    After an error it stays as it is; after SettingsError, RabbitMQ refuses it as it is.
    """
    # Not by the default exchange, by which a message also goes to every queue that its producer named in a header CC.
    if not all(with_producer(app, "traces", lambda producer: publish_confirmed(producer, [anew(message)], queue))):
        raise ServiceUnavailable(f"traces: {_TAKES_NO_MORE.format(queue.name)}")


def acknowledge_all(messages: Sequence[Any]) -> None:
    """Acknowledge kombu messages that came by one channel; on Redis in one round trip."""
    if messages and isinstance(channel := messages[0].channel, virtual.Channel):
        channel.qos.ack_all([message.delivery_tag for message in messages])
    else:
        for message in messages:
            message.ack()


def check_publishing(app: Celery) -> None:
    """Return if RabbitMQ accepts messages; raises BrokerBlocked if it has an alarm."""

    def probe(producer: Producer) -> None:
        confirming_channel(producer.channel.connection).probe("", producer.connection.connect_timeout)

    with_producer(app, "broker", probe)


def broker_condition(app: Celery) -> Condition:
    """How the Redis of the queues is set up, and what has become of its memory."""
    return with_producer(app, "broker", lambda producer: condition_of(producer.channel.client))
