"""Dead letters of queued messages, and the two queues beside that of traces on RabbitMQ: the intake and the dead queue.

RabbitMQ refuses a client that declares the queue of traces without its arguments; the intake queue has none. What lies there is
moved to the queue of traces. So is what has expired, which RabbitMQ moves to the dead queue as well as poison messages; those
become dead letters, as does what is not parsed, delivered too often, or too large for a worker.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final

from amqp.exceptions import PreconditionFailed
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.publishing import publish_confirmed, with_producer
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.rabbitmq import anew
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.wire import checked_id, deliveries_by, parse_submission, raw_body, submission_in
from kp_scorer.decision import Decision, Received
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace, ServiceUnavailable
from kp_scorer.ledger.dead_letters import DeadLettering, DeadLetters
from kp_scorer.settings import Settings
from kp_scorer.spans.context import context_in


def poison(message: Any, deliveries: int) -> DeadLettering:
    """Why a kombu message that was delivered so often without a result is dead-lettered."""
    detail = f"delivered {deliveries} times, and no worker finished with it"
    return DeadLettering("poison", detail, checked_id(message.headers.get("id")), deliveries=deliveries)


def dead_letter(
    dead_letters: DeadLetters, message: Any, why: DeadLettering, limits: Limits, received: Received | None = None
) -> Decision | None:
    """Dead-letter a kombu message; ``limits`` are those that it was ``received`` within, by a worker.

    It returns the decision on this very submission, if there is one: then nothing is kept. After ServiceUnavailable, as Redis
    cannot be reached, the message must be requeued, not acknowledged.
    """
    # A malformed message is no submission. Of a submission, every worker keeps the same bytes.
    payload = raw_body(message) if why.reason == "malformed" else submission_in(message, limits)
    # What was cut has no type, and may look like a whole trace.
    if why.reason == "poison" and message.content_type == "application/json":
        with suppress(InvalidTrace):
            trace = decode_trace(parse_submission(payload, limits), limits)
            why = why._replace(trace_id=trace.id, digest=trace.digest())
    return dead_letters.dead_letter(payload, why, received)


_RECEIVED_AT_ONCE: Final = 100
_BYTES_AT_ONCE: Final = 1_048_576  # Without the last message: a batch is in memory at once.
_BATCHES: Final = 5  # In one call, so that a worker can stop before the queue is empty.


@dataclass
class SideQueue:
    """The intake queue or the dead queue, which each worker empties. One thread owns it."""

    app: Celery
    queue: Queue
    settings: Settings
    dead_letters: DeadLetters
    publisher: Publisher  # Publishes what is decided already.

    def __post_init__(self) -> None:
        self._queues = submission_queues(self.settings)

    def drain(self) -> None:
        """Move or dead-letter the messages on the queue, 500 at most.

        A message leaves the queue when RabbitMQ has confirmed it on the queue of traces, or its dead letter is stored. A worker
        that dies in between leaves a copy, which is the same submission and ends the same way.

        Raises the errors of :mod:`~kp_scorer.broker.publishing`, also if Redis fails; the rest stays on the queue.
        """
        # A queue is missing if somebody deleted it, perhaps with the others.
        if_missing = [self.queue, *self._queues.in_order]
        for _ in range(_BATCHES):
            if not with_producer(self.app, self.queue.name, self._drain_batch, if_missing):
                return

    def _drain_batch(self, producer: Producer) -> int:
        """End a batch; return how many messages it had. An error ends the connection, and RabbitMQ requeues the rest."""
        messages = self._receive(producer.channel)
        # First, as an outage of Redis keeps poison messages here.
        to_move = [message for message in messages if not self._is_poison(message)]
        moved = self._move(producer, to_move) if to_move else []
        for message in compress(to_move, moved):
            message.ack()
        for message in filter(self._is_poison, messages):
            why = poison(message, self.settings.broker.delivery_limit)
            if decision := dead_letter(self.dead_letters, message, why, self.settings.limits):
                # The worker that decided may have died before it published.
                self.publisher.publish(decision, context_in(message.headers), message)
            message.ack()
        if not all(moved):
            # A new connection is needed too: RabbitMQ may go on refusing on one on which it has refused a message.
            raise ServiceUnavailable(f"{self.queue.name}: the queue {self._queues.traces.name} takes no more")
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

    def _is_poison(self, message: Any) -> bool:
        """Whether RabbitMQ moved a message because it was delivered too often, and not because it expired, or had no room."""
        match message.headers.get("x-death"):
            # RabbitMQ puts its own entry before those that a producer may have written.
            case [{"reason": reason}, *_] if self.queue == self._queues.dead:
                return bool(reason == "delivery_limit")
        return bool(self.queue == self._queues.dead)

    def _move(self, producer: Producer, messages: Sequence[Any]) -> list[bool]:
        """Publish messages to the queue of traces; return for each whether it may leave this one."""
        try:
            return publish_confirmed(producer, [anew(message) for message in messages], self._queues.traces)
        except PreconditionFailed as error:
            # RabbitMQ refuses one message and drops the others with it, for instance one over a limit that has been lowered.
            if len(messages) == 1:
                detail = f"message: RabbitMQ refuses it ({error.reply_text})"
                (message,) = messages
                why = DeadLettering("malformed", detail, deliveries=deliveries_by(message))
                self.dead_letters.dead_letter(raw_body(message), why)
                return [True]
        return [is_moved for message in messages for is_moved in self._move(producer, [message])]
