"""Everything that is put on a queue: on RabbitMQ confirmed and routed, on either broker within ``broker.timeout_s``."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from amqp.exceptions import AMQPError, MessageNacked
from celery import Celery
from kombu import Producer, Queue
from kombu.exceptions import LimitExceeded, OperationalError
from redis.exceptions import RedisError, ResponseError

from worker.broker import TASK_NAME
from worker.errors import ServiceUnavailable, SettingsError
from worker.redis_client import is_full

_PRECONDITION_FAILED: Final = 406
_RETRY_PAUSES_S: Final = (0.1, 0.5)

Found = TypeVar("Found")


def declare_queues(app: Celery, queues: Sequence[Queue]) -> None:
    """Make the queues exist, in order.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached.
    """
    reliably(app, "queues", lambda producer: [queue(producer.channel).declare() for queue in queues])


def publish_options(app: Celery) -> dict[str, Any]:
    """How everything is published, whether through a producer or by ``send_task``.

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


def reliably(app: Celery, what: str, use: Callable[[Producer], Found]) -> Found:
    """Call ``use`` with a producer, again on a new connection if the broker fails it, and return what it returns.

    Queues declared through the producer are declared again on the new connection. ``use`` has to be safe to repeat. On
    RabbitMQ a publish returns once the broker has confirmed it, and raises ``amqp.exceptions.MessageNacked`` if it refused.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached, has no such queue, or did not confirm in time.
    """
    for pause_s in (*_RETRY_PAUSES_S, None):
        with _producer(app, what) as producer:
            connection = producer.connection
            try:
                return use(producer)
            except (OperationalError, *connection.connection_errors, *connection.channel_errors) as error:
                # A confirm that is still on its way would be taken for that of the next message on this channel, and
                # closing politely would wait for a peer that may be gone.
                connection.collect()
                if getattr(error.__cause__ or error, "reply_code", None) == _PRECONDITION_FAILED:
                    raise SettingsError(f"{what}: {error}; make the settings equal, or delete the queue") from error
                if pause_s is None:
                    raise ServiceUnavailable(f"{what}: {_described(error)}") from error
        time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def unavailable_if_broker_fails(what: str) -> Iterator[None]:
    """Turn the broker's connection trouble, and its refusals, into ServiceUnavailable."""
    try:
        yield
    except (OperationalError, OSError, AMQPError, RedisError) as error:
        raise ServiceUnavailable(f"{what}: {_described(error)}") from error


def send_trace(app: Celery, queues: Sequence[Queue], trace_id: str, payload: dict[str, Any]) -> None:
    """Put a submission on the last of the queues, having declared them all.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached, refuses, or did not confirm in time.
    """

    def send(producer: Producer) -> None:
        app.send_task(
            TASK_NAME,
            args=[payload],
            queue=queues[-1],
            # So that a message whose body nobody dares to read still says which trace it is.
            task_id=trace_id,
            # Celery would otherwise put a printed copy of the arguments into the headers.
            argsrepr="(trace,)",
            kwargsrepr="{}",
            declare=queues,
            producer=producer,
            **publish_options(app),
        )

    try:
        reliably(app, "submit", send)
    except MessageNacked as error:
        raise ServiceUnavailable("submit: the broker refuses") from error


def waiting(app: Celery, queue: Queue) -> int:
    """How many messages wait in a queue, not counting those in hand.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached.
    """
    return reliably(app, queue.name, lambda producer: int(queue(producer.channel).queue_declare().message_count))


@contextmanager
def _producer(app: Celery, what: str) -> Iterator[Producer]:
    try:
        lent = app.producer_pool.acquire(block=True, timeout=app.conf.broker_pool_acquire_timeout)
    except LimitExceeded:
        raise ServiceUnavailable(f"{what}: every connection to the broker is waiting for it") from None
    with lent as producer:
        yield producer


def _described(error: Exception) -> str:
    if isinstance(error, ResponseError):
        # What Redis answers quotes the command, and with it what the trace says.
        return (
            "the broker is full, its maxmemory is reached" if is_full(error) else f"the broker refuses ({type(error).__name__})"
        )
    return f"cannot use the broker ({type(error).__name__}: {error})"
