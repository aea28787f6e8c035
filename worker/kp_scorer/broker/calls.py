"""Calls to the broker, each within ``broker.timeout_s``, and retried on a new connection.

They raise ServiceUnavailable if the broker cannot be reached, has no such queue, refuses, or does not confirm in time; and
SettingsError if RabbitMQ has a queue of this name with other arguments, or one that is exclusive to another connection.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from amqp.exceptions import AccessRefused, AMQPError, NotFound, PreconditionFailed, ResourceLocked
from celery import Celery
from kombu import Producer, Queue
from kombu.exceptions import LimitExceeded, OperationalError
from redis.exceptions import RedisError

from kp_scorer.broker.rabbitmq import confirming_channel, set_aside
from kp_scorer.errors import BrokerBlocked, NoQueue, ServiceUnavailable, SettingsError
from kp_scorer.store.condition import Condition, condition_of
from kp_scorer.store.connection import REFUSALS, refusal

_NO_ROUTE: Final = 312
# The pauses before the second and third attempts. After these, a worker's pipeline retries every second.
_RETRY_PAUSES_S: Final = (0.1, 0.5)
_NO_QUEUE: Final = "RabbitMQ has no queue {!r}, or no exchange that leads to it, and this user may not make it: start a worker"
_NOT_OURS: Final = "RabbitMQ has no queue {!r}: start a worker of the app that consumes it, which declares it"

T = TypeVar("T")


def declare_queues(app: Celery, queues: Sequence[Queue]) -> None:
    """Declare the queues, in order."""
    with_producer(app, "queues", lambda producer: [queue(producer.channel).declare() for queue in queues])


def with_producer(app: Celery, purpose: str, use: Callable[[Producer], T], if_missing: Sequence[Queue] = ()) -> T:
    """Call ``use`` with a producer and return its result; if the broker or connection fails, retry on a new connection.

    ``use`` works on the last of the queues ``if_missing``. They are declared only after RabbitMQ has reported that one is
    missing, because not every user may declare queues. A queue with ``no_declare`` belongs to another app; if it is missing,
    NoQueue is raised. ``use`` has to be safe to repeat.
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
                set_aside(connection)
                raise
            except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
                # Drop the connection without closing it: on this channel a late confirm would count as that of the next
                # message, and closing would wait for a peer that may be gone.
                connection.collect()
                cause = error.__cause__ or error
                if isinstance(cause, PreconditionFailed | ResourceLocked):
                    remedy = "make the settings equal, or delete the queue"
                    if isinstance(cause, ResourceLocked):
                        remedy = "close the connection that declared it"
                    if "limit" in str(error) and "inequivalent" not in str(error):
                        remedy = "raise the limit of the virtual host, or delete other queues"
                    raise SettingsError(f"{purpose}: {error}; {remedy}") from error
                if isinstance(cause, AccessRefused) and declared:
                    raise ServiceUnavailable(f"{purpose}: {_NO_QUEUE.format(declared[-1].name)}") from error
                if isinstance(cause, NotFound) or getattr(cause, "reply_code", None) == _NO_ROUTE:
                    if if_missing and if_missing[-1].no_declare:
                        raise NoQueue(f"{purpose}: {_NOT_OURS.format(if_missing[-1].name)}") from error
                    declared = if_missing
                if (pause_s := next(pauses, None)) is None:
                    raise ServiceUnavailable(f"{purpose}: {described(error)}") from error
        time.sleep(pause_s)


def with_redis(app: Celery, purpose: str, use: Callable[[Any], T]) -> T:
    """Call ``use`` with a client of the Redis that holds the queues, and return its result, as :func:`with_producer` does."""
    return with_producer(app, purpose, lambda producer: use(producer.channel.client))


@contextmanager
def unavailable_if_broker_fails(purpose: str) -> Iterator[None]:
    """Turn the broker's connection errors and refusals into ServiceUnavailable."""
    try:
        yield
    except (OperationalError, OSError, AMQPError, RedisError) as error:
        raise ServiceUnavailable(f"{purpose}: {described(error)}") from error


def described(error: Exception) -> str:
    """Return a description of an error of the broker, without trace content."""
    # Kombu wraps errors that occur while it publishes.
    cause = error.__cause__ or error
    if isinstance(cause, REFUSALS):
        return f"the broker refuses: {refusal(cause)}"
    problem = f"cannot use the broker ({type(error).__name__}: {error})"
    is_unreached = isinstance(cause, OSError | RedisError)
    return f"{problem}; is it running where broker.url says?" if is_unreached else problem


def waiting(app: Celery, queue: Queue) -> int:
    """Return the number of messages in a queue, without those in flight; raise NoQueue if it is another app's and missing."""
    passive, if_missing = queue.no_declare, [queue] if queue.no_declare else []
    declared = with_producer(
        app, queue.name, lambda producer: queue(producer.channel).queue_declare(passive=passive), if_missing
    )
    return int(declared.message_count)


def check_publishing(app: Celery) -> None:
    """Return once RabbitMQ has shown that it accepts messages; raise BrokerBlocked if it has an alarm."""
    with_producer(app, "broker", lambda producer: confirming_channel(producer.channel.connection).probe())


def broker_condition(app: Celery) -> Condition:
    """Return the condition of the Redis that holds the queues."""
    return with_redis(app, "broker", condition_of)
