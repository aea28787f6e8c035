"""What RabbitMQ has given out too often, on its way to the dead letters."""

from typing import Any, Final

from celery import Celery
from kombu import Producer

from worker.broker import largest_message_bytes, submission_queues
from worker.dead_letters import DeadLetters
from worker.publishing import reliably
from worker.settings import Settings
from worker.submission import checked_id, raw_body, submission_in

_AT_MOST: Final = 100


class DeadQueue:
    """The queue to which RabbitMQ moves messages that were given out ``broker.delivery_limit`` times. One thread owns it."""

    def __init__(self, app: Celery, settings: Settings, dead_letters: DeadLetters) -> None:
        """Read the queue with a connection of the app's pool."""
        self._app = app
        self._queue = submission_queues(settings)[0]
        self._dead_letters = dead_letters
        self._delivery_limit = settings.broker.delivery_limit
        self._largest_bytes = largest_message_bytes(settings)

    def drain(self) -> None:
        """Make dead letters of what is on the queue, 100 at most.

        A message leaves the queue when its dead letter is kept. Kept again after a crash in between, it is one still.

        Raises:
            SettingsError: RabbitMQ has a queue of this name with other arguments.
            ServiceUnavailable: RabbitMQ or Redis cannot be reached; what was not kept is still on the queue.
        """
        reliably(self._app, "dead queue", self._drain)

    def _drain(self, producer: Producer) -> None:
        producer.maybe_declare(self._queue)
        channel = producer.channel
        for _ in range(_AT_MOST):
            found = channel.basic_get(self._queue.name)
            if found is None:
                return
            # Kombu's own way to get one raises an error for a body that it cannot decompress, again and again.
            message = channel.message_to_python(found)
            self._keep(message)
            message.ack()

    def _keep(self, message: Any) -> None:
        detail = f"given out {self._delivery_limit} times, and no worker came to an end with it"
        trace_id = checked_id(message.headers.get("id"))
        payload = submission_in(raw_body(message), self._largest_bytes)
        self._dead_letters.bury(payload, "poison", detail, trace_id, self._delivery_limit)
