"""The results queues: publish decisions to them, and take decisions off."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, get_args

import structlog
from amqp.exceptions import MessageNacked
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.publishing import declare_queues, publish_options, unavailable_if_broker_fails, waiting, with_producer
from kp_scorer.broker.queues import results_queue
from kp_scorer.decision import Decision, Outcome
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings

_LOOK_EVERY_S: Final = 1.0
"""Seconds between looks at a queue's length, which others change too by publishing and reading."""

log = structlog.get_logger("kp_scorer.broker.results")


class Publisher:
    """Publishes decisions. Safe to share between threads."""

    def __init__(self, app: Celery, settings: Settings) -> None:
        """Publish through the app's connection pool."""
        queues = {outcome: results_queue(settings, outcome) for outcome in get_args(Outcome)}
        # One outbox for each queue, because both outcomes may go to the same one.
        outboxes = {queue.name: _Outbox(app, queue, settings.queues.results_limit) for queue in queues.values()}
        self._outboxes: dict[Outcome, _Outbox] = {outcome: outboxes[queue.name] for outcome, queue in queues.items()}

    def publish(self, decision: Decision) -> None:
        """Put a decision on its outcome's queue, as a persistent JSON message whose id is the trace's.

        Returns once the broker has the decision.

        Raises:
            SettingsError: RabbitMQ has a queue of this name with other arguments.
            ServiceUnavailable: the broker cannot be reached, or the queue is full of unread decisions. Publish again,
                which is safe, because consumers go by the trace id.
        """
        self._outboxes[decision.outcome].put(decision)


class _Outbox:
    """One queue of decisions, and whether it has room."""

    def __init__(self, app: Celery, queue: Queue, limit: int) -> None:
        self._app = app
        self._queue = queue
        self._limit = limit
        self._lock = threading.Lock()
        self._full = False
        self._room = 0
        self._look_again_at = 0.0

    def put(self, decision: Decision) -> None:
        def publish(producer: Producer) -> None:
            producer.publish(
                decision.model_dump_json(),
                exchange="",
                routing_key=self._queue.name,
                content_type="application/json",
                content_encoding="utf-8",
                message_id=decision.trace_id,
                declare=[self._queue],
                **publish_options(self._app),
            )

        has_room = not self._limit or self._has_room()
        if has_room:
            try:
                with_producer(self._app, "results", publish)
            except MessageNacked:
                # Others have filled the queue since the last look.
                has_room = False
        if not has_room:
            raise ServiceUnavailable(f"results: the queue {self._queue.name} is full of unread decisions")

    def _has_room(self) -> bool:
        """Whether the queue has room for one more decision; one thread looks for all threads, as rarely as possible."""
        with self._lock:
            used_up = self._room <= 0 and not self._full
            if used_up or time.monotonic() >= self._look_again_at:
                self._look_again_at = time.monotonic() + _LOOK_EVERY_S
                self._look()
            if self._full:
                return False
            self._room -= 1
            return True

    def _look(self) -> None:
        unread = waiting(self._app, self._queue)
        self._room = self._limit - unread
        was_full, self._full = self._full, self._room <= 0
        if self._full and not was_full:
            log.warning("results_full", queue=self._queue.name, unread=unread)
        elif was_full and not self._full:
            log.info("results_drained", queue=self._queue.name, unread=unread)


class Results:
    """Takes decisions off the results queues."""

    def __init__(self, queues: Sequence[Queue]) -> None:
        """Take from these queues, which are bound to a channel."""
        self._queues = queues

    def take(self) -> Iterator["Taken"]:
        """Yield what is on the queues now, each message once; a message returns to its queue unless acknowledged.

        Raises:
            ServiceUnavailable: the broker cannot be reached.
        """
        for queue in self._queues:
            while (message := self._next(queue)) is not None:
                yield Taken(message)

    @staticmethod
    def _next(queue: Any) -> Any:
        with unavailable_if_broker_fails("results"):
            return queue.get()


class Taken:
    """A decision taken off a queue, as the JSON object that was published."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.decision: dict[str, Any] = message.decode()

    def acknowledge(self) -> None:
        """Remove the decision from its queue for good.

        Raises:
            ServiceUnavailable: the broker cannot be reached; the decision stays on its queue.
        """
        with unavailable_if_broker_fails("results"):
            self._message.ack()


@contextmanager
def open_results(app: Celery, settings: Settings, outcome: Outcome | None = None) -> Iterator[Results]:
    """Connect to the queue of one outcome, or to those of both.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached.
    """
    wanted = [outcome] if outcome else get_args(Outcome)
    queues = {queue.name: queue for queue in (results_queue(settings, each) for each in wanted)}
    declare_queues(app, list(queues.values()))
    with app.connection_for_read() as connection:
        with unavailable_if_broker_fails("results"):
            channel = connection.default_channel
        yield Results([queue(channel) for queue in queues.values()])
