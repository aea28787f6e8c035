"""Dead letters of queued messages, and RabbitMQ's two queues beside the queue of traces: the intake and the dead queue.

RabbitMQ refuses a client that declares the queue of traces without its arguments, so such clients use the intake queue, which
has none. RabbitMQ moves messages that have expired or found no room to the dead queue. Workers move the messages of both to the
queue of traces.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

import structlog
from amqp.exceptions import PreconditionFailed
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.calls import with_producer
from kp_scorer.broker.headers import deliveries_by
from kp_scorer.broker.publishing import publish_confirmed
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.broker.rabbitmq import anew
from kp_scorer.broker.wire import argument_in, checked_id, raw_body, submission_in
from kp_scorer.decision import Decision, Received
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.limits import Limits
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering, DeadLetters

log = structlog.get_logger("kp_scorer.broker.dead_queue")


def poison(message: Any, readers: int) -> DeadLettering:
    """Return the reason to dead-letter a kombu message that ``readers`` workers have begun to read and none has finished."""
    detail = f"{readers} workers died or failed as they read it"
    return DeadLettering("poison", detail, checked_id(message.headers.get("id")), deliveries=deliveries_by(message))


def dead_letter(
    dead_letters: DeadLetters, message: Any, why: DeadLettering, limits: Limits, received: Received | None = None
) -> Decision | None:
    """Dead-letter a kombu message; a worker passes the ``limits`` that it applied, and how the message was ``received``.

    If this very submission has been decided, return the decision and store nothing. After ServiceUnavailable, which means that
    Redis cannot be reached, the message must be requeued, not acknowledged.
    """
    if why.reason == "malformed":
        payload = raw_body(message)
    elif why.reason == "poison" and not why.digest:
        # No worker has read the message to its end. Do not parse it here, as that could end this worker, too.
        payload = argument_in(raw_body(message))
    else:
        # Every worker must keep the same bytes of a submission, because they identify its dead letter.
        payload = submission_in(message, limits)
    return dead_letters.dead_letter(payload, why, received)


_RECEIVED_AT_ONCE: Final = 100
_BYTES_AT_ONCE: Final = 1_048_576  # A batch, which is all in memory, ends with the message that brings it to this size.
_BATCHES: Final = 5  # A call moves no more batches, so that a worker can stop before the queue is empty.


def drain_all(drainers: Sequence["QueueDrainer"]) -> None:
    """Make each drainer move messages, and only then raise an error: one full queue must not delay the others."""
    with ExitStack() as drained:
        for drainer in drainers:
            drained.callback(drainer.drain)


@dataclass
class QueueDrainer:
    """Empties an intake queue or a dead queue. Every worker has one for each, which one thread owns."""

    app: Celery
    queue: Queue
    queues: SubmissionQueues
    store: Store

    def drain(self) -> None:
        """Move up to 500 messages to the queue of traces; raise the errors of :mod:`~kp_scorer.broker.calls`.

        A message leaves its queue once RabbitMQ has confirmed the copy on the queue of traces, or its dead letter is stored. A
        worker that dies in between leaves a copy, which is the same submission and ends the same way.
        """
        # If the queue is missing, somebody has deleted it, perhaps together with the others, so declare them all again.
        if_missing = [self.queue, *self.queues.in_order]
        for _ in range(_BATCHES):
            if not with_producer(self.app, self.queue.name, self._drain_batch, if_missing):
                return

    def _drain_batch(self, producer: Producer) -> int:
        """Move or dead-letter a batch; return its number of messages. After an error RabbitMQ requeues the rest."""
        messages = self._receive(producer.channel)
        moved = self._move(producer, messages) if messages else []
        for message in compress(messages, moved):
            message.ack()
        if not all(moved):
            # The next attempt also needs a new connection: RabbitMQ may go on refusing on one that has had a message refused.
            raise ServiceUnavailable(f"{self.queue.name}: the queue {self.queues.traces.name} takes no more")
        return len(messages)

    def _receive(self, channel: Any) -> list[Any]:
        messages: list[Any] = []
        size = 0
        while len(messages) < _RECEIVED_AT_ONCE and size < _BYTES_AT_ONCE:
            delivered = channel.basic_get(self.queue.name)
            if delivered is None:
                break
            messages.append(channel.message_to_python(delivered))
            size += len(messages[-1].body)
        return messages

    def _move(self, producer: Producer, messages: Sequence[Any]) -> list[bool]:
        """Publish messages to the queue of traces; return whether each may leave its present queue."""
        try:
            return publish_confirmed(producer, [anew(message) for message in messages], self.queues.traces)
        except PreconditionFailed as error:
            # If RabbitMQ refuses one message, such as one over a limit that was lowered, it drops the others of the batch too.
            if len(messages) == 1:
                detail = f"message: RabbitMQ refuses it ({error.reply_text})"
                (message,) = messages
                why = DeadLettering("malformed", detail, deliveries=deliveries_by(message))
                self.store.dead_letters.dead_letter(raw_body(message), why)
                return [True]
        return [is_moved for message in messages for is_moved in self._move(producer, [message])]
