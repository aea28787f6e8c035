"""Submissions of producers that declare the queue they send to, on their way to the queue of traces; on RabbitMQ alone."""

from collections.abc import Sequence
from itertools import compress
from typing import Any, Final

import amqp
from amqp.exceptions import PreconditionFailed
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.publishing import confirmed, with_producer
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.broker.task_body import raw_body
from kp_scorer.broker.task_message import as_sent, deliveries_by
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.spans import context_in
from kp_scorer.store import DeadLetters

_MOVED_AT_ONCE: Final = 100
_BYTES_AT_ONCE: Final = 1_048_576
"""Before the last message: what is moved at once is in memory at once."""
_BATCHES: Final = 5
"""In one turn, so that a worker that is told to stop need not empty the queue first."""

_HEADERS: Final = ("task", "id", "ignore_result", "compression")
"""What of a message's headers has any meaning to a worker, beside its context. Others may have one to RabbitMQ, such as where
to send copies."""
_NO_TEXT: Final = "?"
"""In place of a header that is none: what py-amqp reads it cannot always write."""


class Intake:
    """The queue without arguments, to which any client can send that declares its queues. One thread owns it."""

    def __init__(self, app: Celery, queues: SubmissionQueues, intake: Queue, dead_letters: DeadLetters) -> None:
        """Move from ``intake`` to the queue of traces with connections of the app's pool; keep what cannot be moved."""
        self._app = app
        self._traces = queues.traces
        # If one is missing, whoever deleted it may have deleted the others; the last is the one that is sent to.
        self._if_missing = [intake, *queues.in_order]
        self._intake = intake
        self._dead_letters = dead_letters
        self._timeout_s: float = app.conf.broker_connection_timeout

    def move(self) -> None:
        """Move what is on the intake queue, 500 messages at most.

        A message leaves it when RabbitMQ has confirmed it on the queue of traces. A worker that dies in between leaves a copy,
        which is the same submission and ends the same way.

        Raises:
            SettingsError: a queue has to be declared anew, and RabbitMQ has one of this name with other arguments.
            ServiceUnavailable: RabbitMQ cannot be reached or refuses, or Redis cannot be; what was not moved is still there.
        """
        for _ in range(_BATCHES):
            if not with_producer(self._app, "intake", self._move_some, self._if_missing):
                return

    def _move_some(self, producer: Producer) -> int:
        """Move a batch; return how many messages it had. An error ends the connection, and what has not moved comes back."""
        messages = self._take(producer.channel)
        moved = self._put(producer, messages) if messages else []
        for message in compress(messages, moved):
            message.ack()
        if not all(moved):
            # Also because RabbitMQ may refuse for ever what comes by a connection of which it has refused something.
            raise ServiceUnavailable(f"intake: the queue {self._traces.name} takes no more")
        return len(messages)

    def _take(self, channel: Any) -> list[Any]:
        messages: list[Any] = []
        size = 0
        while len(messages) < _MOVED_AT_ONCE and size < _BYTES_AT_ONCE:
            found = channel.basic_get(self._intake.name)
            if found is None:
                break
            messages.append(channel.message_to_python(found))
            size += len(messages[-1].body)
        return messages

    def _put(self, producer: Producer, messages: Sequence[Any]) -> list[bool]:
        """Publish messages; tell of each whether it may leave the intake."""
        try:
            return confirmed(producer, [_anew(message) for message in messages], self._traces, self._timeout_s)
        except PreconditionFailed as error:
            # RabbitMQ takes offence at one message and drops the others with it, as when it is larger than is allowed since.
            if len(messages) == 1:
                detail = f"message: RabbitMQ refuses it ({error.reply_text})"
                self._dead_letters.bury(raw_body(messages[0]), "malformed", detail, deliveries=deliveries_by(messages[0]))
                return [True]
        return [is_moved for message in messages for is_moved in self._put(producer, [message])]


def _anew(message: Any) -> amqp.Message:
    """A message of the same content, and nothing else of what its producer wrote."""
    headers = as_sent(message.headers)
    kept = {name: headers[name] for name in _HEADERS if name in headers}
    texts: dict[str, str | bool] = {name: value if isinstance(value, str | bool) else _NO_TEXT for name, value in kept.items()}
    return amqp.Message(
        raw_body(message),
        content_type="application/json" if message.content_type == "application/json" else "application/octet-stream",
        application_headers=texts | dict(context_in(headers)),
        delivery_mode=2,
    )
