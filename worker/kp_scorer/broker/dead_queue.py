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

import structlog
from amqp.exceptions import PreconditionFailed
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.connection import with_producer
from kp_scorer.broker.publishing import Publisher, publish_confirmed
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.rabbitmq import anew
from kp_scorer.broker.wire import argument_in, checked_id, deliveries_by, parse_submission, raw_body, submission_in
from kp_scorer.decision import Decision, Received
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace, ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.spans.context import context_in
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering, DeadLetters
from kp_scorer.store.records import Identity

log = structlog.get_logger("kp_scorer.broker.dead_queue")


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
    if why.reason == "poison":
        payload, identity = _read_carefully(dead_letters, message, limits)
        if identity:
            why = why._replace(trace_id=identity.trace_id, digest=identity.digest)
    else:
        # A malformed message is no submission. Of a submission, every worker keeps the same bytes.
        payload = raw_body(message) if why.reason == "malformed" else submission_in(message, limits)
    return dead_letters.dead_letter(payload, why, received)


def _read_carefully(dead_letters: DeadLetters, message: Any, limits: Limits) -> tuple[bytes, Identity | None]:
    """The submission in a message, and which trace it is, if any.

    What may have ended its readers is noted before it is read. After too many of them it is returned unread.
    """
    body = raw_body(message)
    if dead_letters.begin_reading(body) > _MOST_READERS:
        return argument_in(body), None
    payload, identity = submission_in(message, limits), None
    # What was cut has no type, and may look like a whole trace.
    if message.content_type == "application/json":
        with suppress(InvalidTrace):
            trace = decode_trace(parse_submission(payload, limits), limits)
            identity = Identity(trace.id, trace.digest())
    dead_letters.end_reading(body)
    return payload, identity


_MOST_READERS: Final = 3  # That a message ends once it was delivered too often.
_RECEIVED_AT_ONCE: Final = 100
_BYTES_AT_ONCE: Final = 1_048_576  # Without the last message: a batch is in memory at once.
_BATCHES: Final = 5  # In one call, so that a worker can stop before the queue is empty.


@dataclass
class QueueDrainer:
    """Empties the intake queue or the dead queue, as each worker does. One thread owns it."""

    app: Celery
    queue: Queue
    settings: Settings
    store: Store
    publisher: Publisher  # Publishes what is decided already.

    def __post_init__(self) -> None:
        self._queues = submission_queues(self.settings)

    def drain(self) -> None:
        """Move or dead-letter the messages on the queue, 500 at most.

        A message leaves the queue when RabbitMQ has confirmed it on the queue of traces, or its dead letter is stored. A worker
        that dies in between leaves a copy, which is the same submission and ends the same way.

        Raises the errors of :mod:`~kp_scorer.broker.connection`, also if Redis fails; the rest stays on the queue.
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
            if self._was_tried(message):
                self._dead_letter(message)
            else:
                log.warning(
                    "message_moved_back", detail="it was delivered too often, as connections were lost, and never tried"
                )
                moved += self._move(producer, [message])
                if not moved[-1]:
                    continue
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

    def _was_tried(self, message: Any) -> bool:
        """Return whether workers have tried a message, by what the ledger noted of its trace; of one without, they may have."""
        _, identity = _read_carefully(self.store.dead_letters, message, self.settings.limits)
        if identity is None:
            return True
        # A dead worker that held it is charged with an attempt now.
        (record,) = self.store.ledger.acquire([identity])
        if record.state != "pending" or record.digest != identity.digest or record.attempts:
            return True
        if not record.is_held:
            self.store.ledger.release([identity.trace_id])
        return False

    def _dead_letter(self, message: Any) -> None:
        why = poison(message, self.settings.broker.delivery_limit)
        if decision := dead_letter(self.store.dead_letters, message, why, self.settings.limits):
            # The worker that decided may have died before it published.
            self.publisher.publish(decision, context_in(message.headers), message)

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
                self.store.dead_letters.dead_letter(raw_body(message), why)
                return [True]
        return [is_moved for message in messages for is_moved in self._move(producer, [message])]
