"""Messages on Redis that were too large for a worker: each is kept whole, and known by the dead letter of its beginning."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.publishing import with_producer
from kp_scorer.broker.queues import results_queues, submission_queues
from kp_scorer.broker.redis_transport.queue import RedisQueue
from kp_scorer.settings import Settings
from kp_scorer.store.submissions import letter_id_of

Found = TypeVar("Found")


class _Kept(NamedTuple):
    queue: Queue
    beginning: bytes
    size_bytes: int


class Oversized:
    """The messages that were kept as this was made."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        """Look once at what the queues keep, which on RabbitMQ is nothing.

        Raises:
            ServiceUnavailable: the broker cannot be reached.
        """
        self._app = app
        queues = []
        if settings.broker.is_redis:
            queues = [submission_queues(settings).traces, *results_queues(settings, settings.outcomes).values()]
        self._kept = {
            letter_id_of(beginning): _Kept(queue, beginning, size_bytes)
            for queue in queues
            for beginning, size_bytes in _on(app, queue, RedisQueue.oversized)
        }

    def size_bytes(self, letter_id: str) -> int | None:
        """Size of the message whose beginning is the dead letter of this id; None if none is kept."""
        kept = self._kept.get(letter_id)
        return kept.size_bytes if kept else None

    def whole(self, letter_id: str) -> bytes | None:
        """The message whose beginning is the dead letter of this id; None if none is kept.

        Raises:
            ServiceUnavailable: the broker cannot be reached.
        """
        kept = self._kept.get(letter_id)
        return _on(self._app, kept.queue, lambda queue, client: queue.whole(client, kept.beginning)) if kept else None

    def remove(self, letter_id: str) -> None:
        """Keep what begins as the dead letter of this id no longer.

        Raises:
            ServiceUnavailable: the broker cannot be reached.
        """
        if kept := self._kept.get(letter_id):
            _on(self._app, kept.queue, lambda queue, client: queue.remove_oversized(client, kept.beginning))


def count_oversized(app: Celery, queue: Queue) -> int:
    """How many messages of a queue on Redis are kept.

    Raises:
        ServiceUnavailable: the broker cannot be reached.
    """
    return _on(app, queue, RedisQueue.count_oversized)


def _on(app: Celery, queue: Queue, use: Callable[[RedisQueue, Any], Found]) -> Found:
    """Call ``use`` with a queue on Redis and a connection to it."""

    def with_connection(producer: Producer) -> Found:
        with producer.channel.conn_or_acquire() as client:
            return use(producer.channel.queue(queue.name), client)

    return with_producer(app, queue.name, with_connection)
