"""Decisions on their way out, and taken off again: the results queues."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from kombu import Connection

from worker.broker import plain_queue, unavailable_if_down
from worker.decision import Decision, Outcome
from worker.settings import QueueSettings


class Publisher:
    """Publishes decisions. Safe to share between threads."""

    def __init__(self, app: Celery, queues: QueueSettings) -> None:
        """Publish through the app's connection pool."""
        self._app = app
        self._queues: dict[Outcome, Any] = {
            "accepted": plain_queue(queues.accepted),
            "rejected": plain_queue(queues.rejected),
        }

    def publish(self, decision: Decision) -> None:
        """Put a decision on its outcome's queue, as a persistent JSON message whose id is the trace's.

        Raises:
            ServiceUnavailable: the broker cannot be reached; publishing again is safe, consumers go by the trace id.
        """
        queue = self._queues[decision.outcome]
        with unavailable_if_down("results"), self._app.producer_pool.acquire(block=True) as producer:
            producer.publish(
                decision.model_dump(mode="json"),
                exchange="",
                routing_key=queue.name,
                serializer="json",
                message_id=decision.trace_id,
                declare=[queue],
                retry=True,
                retry_policy={"max_retries": 3, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 1.0},
            )


class Results:
    """Takes decisions off the results queues."""

    def __init__(self, connection: Connection, queues: QueueSettings, outcome: Outcome | None = None) -> None:
        """Take those of one outcome, or of both."""
        names = {"accepted": queues.accepted, "rejected": queues.rejected}
        wanted = [names[outcome]] if outcome else list(names.values())
        channel = connection.default_channel
        self._queues = [plain_queue(name)(channel) for name in dict.fromkeys(wanted)]
        for queue in self._queues:
            queue.declare()

    def take(self) -> Iterator["Taken"]:
        """Give what is on the queues now, each message once; it returns to its queue unless acknowledged.

        Raises:
            ServiceUnavailable: the broker cannot be reached.
        """
        for queue in self._queues:
            while (message := self._next(queue)) is not None:
                yield Taken(message)

    @staticmethod
    def _next(queue: Any) -> Any:
        with unavailable_if_down("results"):
            return queue.get()


class Taken:
    """A decision taken off a queue, as the JSON object that was published."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.decision: dict[str, Any] = message.decode()

    def acknowledge(self) -> None:
        """Remove it from its queue for good.

        Raises:
            ServiceUnavailable: the broker cannot be reached; the decision stays on its queue.
        """
        with unavailable_if_down("results"):
            self._message.ack()


@contextmanager
def open_results(app: Celery, queues: QueueSettings, outcome: Outcome | None = None) -> Iterator[Results]:
    """Connect to the results queues.

    Raises:
        ServiceUnavailable: the broker cannot be reached.
    """
    with app.connection_for_read() as connection:
        with unavailable_if_down("results"):
            connection.ensure_connection(max_retries=2, interval_start=0.1, interval_step=0.2)
            results = Results(connection, queues, outcome)
        yield results
