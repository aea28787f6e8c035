"""What RabbitMQ has delivered too often, on its way to the dead letters."""

from typing import Final

from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.burying import bury_poison
from kp_scorer.broker.publishing import with_producer
from kp_scorer.broker.results import Publisher
from kp_scorer.settings import Settings
from kp_scorer.spans import context_in
from kp_scorer.store import DeadLetters

_DRAINED_AT_ONCE: Final = 100


class DeadQueue:
    """The queue to which RabbitMQ moves messages that were delivered ``broker.delivery_limit`` times. One thread owns it."""

    def __init__(self, app: Celery, queue: Queue, dead_letters: DeadLetters, publisher: Publisher, settings: Settings) -> None:
        """Read ``queue`` with a connection of the app's pool."""
        self._app = app
        self._queue = queue
        self._dead_letters = dead_letters
        self._publisher = publisher
        self._delivery_limit = settings.broker.delivery_limit
        self._limits = settings.limits

    def drain(self) -> None:
        """Make dead letters of what is on the queue, 100 at most.

        A message leaves the queue when its dead letter is kept. Kept again after a crash in between, it is one still.

        Raises:
            SettingsError: RabbitMQ has a queue of this name with other arguments.
            ServiceUnavailable: RabbitMQ or Redis cannot be reached; what was not kept is still on the queue.
        """
        with_producer(self._app, "dead queue", self._drain)

    def _drain(self, producer: Producer) -> None:
        producer.maybe_declare(self._queue)
        channel = producer.channel
        for _ in range(_DRAINED_AT_ONCE):
            found = channel.basic_get(self._queue.name)
            if found is None:
                return
            message = channel.message_to_python(found)
            decision = bury_poison(self._dead_letters, message, self._delivery_limit, self._limits)
            if decision is not None:
                # Its worker may have died before it was published.
                self._publisher.publish(decision, context_in(message.headers))
            message.ack()
