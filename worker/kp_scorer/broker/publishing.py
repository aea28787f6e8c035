"""Publish to the queues: on RabbitMQ confirmed and routed, on either broker with each step within ``broker.timeout_s``."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

import amqp
from amqp.exceptions import AMQPError
from celery import Celery
from kombu import Producer, Queue
from kombu.exceptions import LimitExceeded, OperationalError
from kombu.transport import virtual
from redis.exceptions import RedisError

from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.broker.rabbitmq_confirms import confirming_channel
from kp_scorer.broker.task_body import task_body
from kp_scorer.broker.task_message import SENT_MS, TASK_NAME, as_sent
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.spans import Destination, sending
from kp_scorer.store.connection import REFUSALS, refusal
from kp_scorer.store.suitability import shortcomings

_NO_ROUTE: Final = 312
_ACCESS_REFUSED: Final = 403
_NOT_FOUND: Final = 404
_PRECONDITION_FAILED: Final = 406
_RETRY_PAUSES_S: Final = (0.1, 0.5)
_NO_QUEUE: Final = "RabbitMQ has no queue {!r}, or no exchange that leads to it, and this user may not make it: start a worker"

_NOT_OURS: Final = "RabbitMQ has no queue {!r}: start a worker of the app that takes what is on it, which declares it"

Found = TypeVar("Found")


class NoQueue(ServiceUnavailable):
    """RabbitMQ has no such queue, and it is not for us to declare it."""


def declare_queues(app: Celery, queues: Sequence[Queue]) -> None:
    """Declare the queues, in order.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached.
    """
    with_producer(app, "queues", lambda producer: [queue(producer.channel).declare() for queue in queues])


def publish_options(app: Celery) -> dict[str, Any]:
    """Options of a publish through kombu's producer.

    A message for which there is no queue comes back as an error, and no step waits longer than ``broker.timeout_s``. Kombu's
    own retrying stays off: it takes a refusal for a broken connection.
    """
    timeout_s = app.conf.broker_connection_timeout
    return {
        "delivery_mode": "persistent",
        "mandatory": True,
        "timeout": timeout_s,
        "confirm_timeout": timeout_s,
        "retry": False,
    }


def with_producer(app: Celery, what: str, use: Callable[[Producer], Found], if_missing: Sequence[Queue] = ()) -> Found:
    """Call ``use`` with a producer and return its result; if the broker or connection fails, retry on a new connection.

    Queues declared through the producer are declared again on the new connection. The queues ``if_missing``, the last of which
    is the one that ``use`` is about, are declared only when RabbitMQ has said that there is none: not every user may do so. One
    that is never to be declared is another app's. ``use`` has to be safe to repeat.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        NoQueue: RabbitMQ has not got the queue of another app.
        ServiceUnavailable: the broker cannot be reached, has no such queue, or did not confirm in time.
    """
    declared: Sequence[Queue] = ()
    for pause_s in (*_RETRY_PAUSES_S, None):
        with _producer(app, what) as producer:
            connection = producer.connection
            try:
                for queue in declared:
                    queue(producer.channel).declare()
                return use(producer)
            except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
                # Dropped, not closed: a late confirm would be taken for that of the next message on this channel, and
                # closing would wait for a peer that may be gone.
                connection.collect()
                code = getattr(error.__cause__ or error, "reply_code", None)
                if code == _PRECONDITION_FAILED:
                    raise SettingsError(f"{what}: {error}; make the settings equal, or delete the queue") from error
                if code == _ACCESS_REFUSED and declared:
                    raise ServiceUnavailable(f"{what}: {_NO_QUEUE.format(declared[-1].name)}") from error
                if code in (_NO_ROUTE, _NOT_FOUND):
                    if if_missing and if_missing[-1].no_declare:
                        raise NoQueue(f"{what}: {_NOT_OURS.format(if_missing[-1].name)}") from error
                    declared = if_missing
                if pause_s is None:
                    raise ServiceUnavailable(f"{what}: {described(error)}") from error
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def unavailable_if_broker_fails(what: str) -> Iterator[None]:
    """Turn the broker's connection errors and refusals into ServiceUnavailable."""
    try:
        yield
    except (OperationalError, OSError, AMQPError, RedisError) as error:
        raise ServiceUnavailable(f"{what}: {described(error)}") from error


class Outgoing(NamedTuple):
    """A message to be published: UTF-8 JSON and what goes with it."""

    body: bytes
    message_id: str
    headers: Mapping[str, Any] = MappingProxyType({})


def publish_all(
    app: Celery, what: str, queue: Queue, messages: Sequence[Outgoing], if_missing: Sequence[Queue] = (), *, plain: bool = False
) -> list[bool]:
    """Put persistent messages on a queue, in order, and return once the broker has them, all in one round trip.

    For ``if_missing`` see :func:`with_producer`, to which ``what`` goes. On Redis a ``plain`` message is its body and no more.

    Returns:
        For each message whether the queue took it. RabbitMQ refuses what is over the limit of a queue; Redis refuses nothing.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached, has no such queue, or did not confirm in time; some messages may be on
            the queue, and all are to be published again.
    """
    if app.conf.broker_transport:
        publish = _push_to_redis if plain else _publish_to_redis
        with_producer(app, what, lambda producer: publish(producer.channel, queue, messages))
        return [True] * len(messages)
    timeout_s = app.conf.broker_connection_timeout
    prepared = [_for_rabbitmq(message) for message in messages]
    return with_producer(app, what, lambda producer: confirmed(producer, prepared, queue, timeout_s), if_missing)


def _publish_to_redis(channel: Any, queue: Queue, messages: Sequence[Outgoing]) -> None:
    channel.publish_all(
        queue.name,
        [
            channel.prepare_message(
                message.body,
                content_type="application/json",
                content_encoding="utf-8",
                headers=dict(message.headers),
                properties={"message_id": message.message_id, "delivery_mode": 2},
            )
            for message in messages
        ],
    )


def _push_to_redis(channel: Any, queue: Queue, messages: Sequence[Outgoing]) -> None:
    channel.push_all(queue.name, [message.body for message in messages])


def _for_rabbitmq(message: Outgoing) -> amqp.Message:
    return amqp.Message(
        message.body,
        content_type="application/json",
        content_encoding="utf-8",
        application_headers=dict(message.headers),
        message_id=message.message_id,
        delivery_mode=2,
    )


def confirmed(producer: Producer, messages: Sequence[amqp.Message], queue: Queue, timeout_s: float) -> list[bool]:
    """Publish to a queue on RabbitMQ and wait for all confirms together; tell of each message whether the queue took it.

    Raises:
        amqp.exceptions.AMQPError: as :meth:`ConfirmingChannel.publish_all` does; :func:`with_producer` sees to it.
    """
    channel = confirming_channel(producer.channel.connection)
    return channel.publish_all(messages, queue.exchange.name, queue.routing_key, timeout_s)


def send_traces(app: Celery, queues: SubmissionQueues, submissions: Sequence[tuple[str, bytes]]) -> None:
    """Put submissions, each an id and JSON, on the queue of traces; if RabbitMQ has none, declare the queues of submissions.

    Raises:
        SettingsError: the queues have to be declared, and RabbitMQ has one of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached, refuses, or did not confirm in time; or there is no queue, and this
            user may not make it. Some may have been sent.
    """
    headers = {"task": TASK_NAME, SENT_MS: int(time.time() * 1_000)}
    with sending([trace_id for trace_id, _ in submissions], destination_of(app, queues.traces.name)) as contexts:
        messages = [
            Outgoing(task_body(submission), trace_id, {**context, **headers, "id": trace_id})
            for (trace_id, submission), context in zip(submissions, contexts, strict=True)
        ]
        if not all(publish_all(app, "submit", queues.traces, messages, if_missing=queues.in_order)):
            raise ServiceUnavailable("submit: the broker refuses")


def destination_of(app: Celery, queue: str) -> Destination:
    """What spans call a queue on the app's broker."""
    return Destination("redis" if app.conf.broker_transport else "rabbitmq", queue)


def send_again(app: Celery, queue: Queue, message: Any) -> None:
    """Put a message that came from RabbitMQ at the end of ``queue``, as one that was never delivered; to be acknowledged then.

    Raises:
        SettingsError: RabbitMQ refuses the message as it is.
        ServiceUnavailable: the broker cannot be reached, refuses, or did not confirm in time; the message stays as it is.
    """
    # RabbitMQ would refuse another user's name.
    properties = {name: value for name, value in message.properties.items() if name != "user_id"}
    properties["application_headers"] = as_sent(message.headers)
    again = amqp.Message(message.body, **properties)
    timeout_s = app.conf.broker_connection_timeout

    # Not by the default exchange, by which a message also goes to every queue that its producer named in a header CC.
    if not all(with_producer(app, "traces", lambda producer: confirmed(producer, [again], queue, timeout_s))):
        raise ServiceUnavailable("traces: the broker refuses")


def acknowledge_all(messages: Sequence[Any]) -> None:
    """Let go of kombu messages that came by one channel, for good; on Redis in one round trip."""
    if not messages:
        return
    channel = messages[0].channel
    if isinstance(channel, virtual.Channel):
        channel.qos.ack_all([message.delivery_tag for message in messages])
        return
    for message in messages:
        message.ack()


def waiting(app: Celery, queue: Queue) -> int:
    """How many messages wait in a queue, not counting those in hand.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        NoQueue: RabbitMQ has not got the queue of another app.
        ServiceUnavailable: the broker cannot be reached.
    """

    def count(producer: Producer) -> int:
        return int(queue(producer.channel).queue_declare(passive=queue.no_declare).message_count)

    return with_producer(app, queue.name, count, if_missing=[queue] if queue.no_declare else ())


def broker_shortcomings(app: Celery) -> list[str]:
    """What the Redis of the queues is not set up for, each with its remedy.

    Raises:
        ServiceUnavailable: the broker cannot be reached, or does not say.
    """
    return with_producer(app, "broker", lambda producer: list(shortcomings(producer.channel.client.info())))


@contextmanager
def _producer(app: Celery, what: str) -> Iterator[Producer]:
    try:
        lent = app.producer_pool.acquire(block=True, timeout=app.conf.broker_pool_acquire_timeout)
    except LimitExceeded:
        raise ServiceUnavailable(f"{what}: all connections to the broker are in use") from None
    with lent as producer:
        yield producer


def described(error: Exception) -> str:
    """What an error of the broker says, without trace content."""
    # Kombu wraps what it gets while it publishes.
    cause = error.__cause__ or error
    if isinstance(cause, REFUSALS):
        return f"the broker refuses: {refusal(cause)}"
    said = f"cannot use the broker ({type(error).__name__}: {error})"
    is_unreached = isinstance(cause, OSError | RedisError)
    return f"{said}; is it running where broker.url says?" if is_unreached else said
