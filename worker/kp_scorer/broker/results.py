"""Decisions as messages: published to queues, streams and tasks, within their limits, and received from queues.

What publishes or receives raises ServiceUnavailable if the broker or Redis cannot be reached, and SettingsError if RabbitMQ has
a queue of this name with other arguments.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, get_args

import structlog
from celery import Celery
from kombu import Producer, Queue

from kp_scorer.broker.backlog import waiting
from kp_scorer.broker.publishing import (
    Outgoing,
    declare_queues,
    destination_of,
    publish_all,
    unavailable_if_broker_fails,
    with_producer,
)
from kp_scorer.broker.queues import results_queue, results_queues, results_streams
from kp_scorer.broker.wire import raw_body, task_body
from kp_scorer.decision import Decision, Outcome
from kp_scorer.decoding import Limits, parse_strict_json
from kp_scorer.errors import InvalidTrace, ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.ledger import DeadLetters, DecisionStream, Publication, Published, Store
from kp_scorer.settings import QueueSettings, Settings
from kp_scorer.spans.context import NO_CONTEXT, Context, Destination

_MARK: Final = "decided_at"
"""The header that holds a decision's mark."""

_LIMITS: Final = Limits()
"""No decision comes near them, whatever those of traces are set to."""

log = structlog.get_logger("kp_scorer.broker.results")


class Publisher:
    """Publishes decisions. Safe to share between threads."""

    def __init__(self, app: Celery, settings: Settings, store: Store) -> None:
        """Publish through the app's connection pool, and to streams in ``store``."""
        queues, streams = results_queues(settings), results_streams(settings)
        # One outbox for each queue or stream, because several outcomes may go to the same one. One for review also where no
        # trace goes there any more: a decision may have been made before, and not been published.
        of_queues = {queue.name: _QueueOutbox(app, queue, settings, outcome) for outcome, queue in queues.items()}
        of_streams = {name: _StreamOutbox(store.decision_stream(name), settings.queues) for name in streams.values()}
        self._outboxes: dict[Outcome, _Outbox] = {
            **{outcome: of_queues[queue.name] for outcome, queue in queues.items()},
            **{outcome: of_streams[name] for outcome, name in streams.items()},
        }
        self.destinations = {outcome: outbox.destination for outcome, outbox in self._outboxes.items()}
        """The queue or stream of each outcome, as spans name it; outcomes that are not published are missing."""

    def publish(self, decision: Decision, context: Context = NO_CONTEXT) -> None:
        """Put a decision on its outcome's queue, as :meth:`publish_all` does, or raise the error that that returns."""
        (error,) = self.publish_all([Publication(decision, context)])
        if error is not None:
            raise error

    def publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        """Put decisions where those of their outcome go, all of a queue or a stream in one round trip.

        On a queue each is a persistent JSON message, or one that calls a task of another app; its id is the trace's, and its
        header ``decided_at`` is the decision's mark. On a stream each is an entry with fields for both. So are those of its
        context, if it has one. Decisions of an outcome that is not published succeed at once.

        Returns:
            For each decision None once the broker, or Redis, has it; or why it is not published, as that its queue is full of
            unread decisions. Publish those again, which is safe: consumers recognise a copy by its trace id and mark.
        """
        errors: list[ScorerError | None] = [None] * len(publications)
        for outbox in set(self._outboxes.values()):
            places = [
                place for place, (decision, _) in enumerate(publications) if self._outboxes.get(decision.outcome) is outbox
            ]
            if not places:
                continue
            failure: ScorerError = ServiceUnavailable(f"results: the {outbox.name} is full of unread decisions")
            try:
                accepted = outbox.put_all([publications[place] for place in places])
            except (ServiceUnavailable, SettingsError) as error:
                failure, accepted = error, [False] * len(places)
            for place, is_accepted in zip(places, accepted, strict=True):
                errors[place] = None if is_accepted else failure
        return errors


class _Outbox:
    """Where decisions for one queue or stream are put. Safe to share between threads."""

    def __init__(self, kind: str, destination: Destination, settings: QueueSettings) -> None:
        self.name = f"{kind} {destination.name}"
        self.destination = destination
        self._limit = settings.results_limit
        self._lock = threading.Lock()
        self._is_full = False

    def put_all(self, publications: Sequence[Publication]) -> list[bool]:
        """Publish decisions, in order; log when it becomes full, and when that is over.

        Returns:
            For each whether it is published; there is no room for the others. After an error any of them may be.
        """
        accepted, unread = self._put(publications)
        # One that the last decision has just filled does not count as full: nothing waits for room yet.
        is_full = not all(accepted)
        with self._lock:
            was_full, self._is_full = self._is_full, is_full
        if is_full and not was_full:
            log.warning("results_full", queue=self.destination.name, unread=unread)
        elif was_full and not is_full:
            log.info("results_drained", queue=self.destination.name, unread=unread)
        return accepted

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        """Publish; return for each decision whether it is, and how many are unread."""
        raise NotImplementedError


class _QueueOutbox(_Outbox):
    def __init__(self, app: Celery, queue: Queue, settings: Settings, outcome: Outcome) -> None:
        super().__init__("queue", destination_of(app, queue.name), settings.queues)
        self._app = app
        self._queue = queue
        self._task = settings.results.task if settings.results.via(outcome) == "task" else ""

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        messages = [self._message(*publication) for publication in publications]
        if self.destination.system == "redis":
            return self._put_on_redis(messages)
        unread, room = 0, len(messages)
        # RabbitMQ refuses late, and on a queue of another app not at all.
        if self._limit:
            unread = waiting(self._app, self._queue)
            room = max(0, min(room, self._limit - unread))
        accepted = publish_all(self._app, "results", self._queue, messages[:room], [self._queue]) if room else []
        return [*accepted, *[False] * (len(messages) - room)], unread + sum(accepted)

    def _put_on_redis(self, messages: Sequence[Outgoing]) -> tuple[list[bool], int]:
        name = self._queue.name

        def publish(producer: Producer) -> Published:
            items = [producer.channel.envelope(name, *message) for message in messages]
            published: Published = producer.channel.publish_within(name, items, self._limit)
            return published

        return _accepted(with_producer(self._app, "results", publish), len(messages))

    def _message(self, decision: Decision, context: Context) -> Outgoing:
        """The message of a decision, which calls a task if it is for one: copies of it have the same id and the same mark."""
        body, trace_id, headers = decision.model_dump_json().encode(), decision.trace_id, {**context, _MARK: decision.mark}
        if not self._task:
            return Outgoing(body, trace_id, headers)
        # Whether the result is kept, the task says itself.
        call = self._app.amqp.as_task_v2(trace_id, self._task, argsrepr="(decision,)", origin="kp-scorer", ignore_result=None)
        return Outgoing(task_body(body), trace_id, {**call.headers, **headers})


class _StreamOutbox(_Outbox):
    def __init__(self, stream: DecisionStream, settings: QueueSettings) -> None:
        super().__init__("stream", Destination("redis", stream.name), settings)
        self._stream = stream

    def _put(self, publications: Sequence[Publication]) -> tuple[list[bool], int]:
        return _accepted(self._stream.publish(publications, self._limit), len(publications))


def _accepted(published: Published, count: int) -> tuple[list[bool], int]:
    return [place < published.published for place in range(count)], published.unread


def read_elsewhere(settings: Settings, outcome: Outcome | None = None) -> list[str]:
    """How decisions of one outcome, or of all, are read that :func:`open_results` does not read; empty if it reads all."""
    ways = []
    for each in [outcome] if outcome else settings.outcomes:
        name = settings.queues.name(each)
        if settings.results.via(each) == "stream":
            ways.append(f"{each} decisions go to the stream {name} in the Redis of redis.url: read it with XREADGROUP")
        if settings.results.via(each) == "task":
            task = settings.results.task
            ways.append(f"{each} decisions call the task {task} on the queue {name}: workers of its Celery app take them")
    return ways


def _decision_in(message: Any) -> dict[str, Any] | None:
    """The decision as the JSON object that was published, in an envelope or not; None if the message is none."""
    # A message that was cut, and may look complete, has no type.
    if message.content_type != "application/json":
        return None
    try:
        # Not by kombu's decoders, among which the message would choose.
        decision: Any = parse_strict_json(raw_body(message), _LIMITS)
        Decision.model_validate(decision)
    except (InvalidTrace, ValueError):
        return None
    return dict(decision)


class ReceivedDecision:
    """A decision from a queue, as the JSON object that was published; the broker requeues it unless it is acknowledged."""

    def __init__(self, message: Any, decision: dict[str, Any]) -> None:
        self._message = message
        self.decision = decision

    def acknowledge(self) -> None:
        """Remove the decision from its queue for good; after an error it stays there."""
        with unavailable_if_broker_fails("results"):
            self._message.ack()


class Results:
    """Receives decisions from queues; a message that is no decision becomes a dead letter, as it would block its queue."""

    def __init__(self, queues: Sequence[Queue], dead_letters: DeadLetters) -> None:
        """Receive from these queues, which are bound to a channel."""
        self._queues = queues
        self._dead_letters = dead_letters
        self.dead_lettered = 0
        """How many messages were no decisions, so far."""

    def receive(self) -> Iterator[ReceivedDecision]:
        """Yield the decisions on the queues now, each once; the broker requeues those that are not acknowledged."""
        for queue in self._queues:
            while (message := self._next(queue)) is not None:
                decision = _decision_in(message)
                if decision is None:
                    self._dead_letter(queue.name, message)
                else:
                    yield ReceivedDecision(message, decision)

    @staticmethod
    def _next(queue: Any) -> Any:
        with unavailable_if_broker_fails("results"):
            delivered = queue.channel.basic_get(queue.name)
        # The get of kombu 5.7.0 raises an error for a body that it cannot decompress, again and again.
        return None if delivered is None else queue.channel.message_to_python(delivered)

    def _dead_letter(self, queue: str, message: Any) -> None:
        self._dead_letters.dead_letter(raw_body(message), "malformed", f"queue {queue}: expected a decision")
        with unavailable_if_broker_fails("results"):
            message.ack()
        self.dead_lettered += 1


@contextmanager
def open_results(app: Celery, settings: Settings, outcome: Outcome | None = None) -> Iterator[Results]:
    """Connect to the queue of one outcome, or to those of all outcomes; not to streams, nor to queues of tasks of other apps.

    If none of them is a queue, it raises SettingsError.
    """
    # The queue name of an unpublished outcome may be that of a stream or a task queue of another.
    others = {settings.queues.name(each) for each in get_args(Outcome) if settings.results.via(each) in ("stream", "task")}
    asked = [outcome] if outcome else settings.outcomes
    wanted = [each for each in asked if settings.queues.name(each) not in others]
    if not wanted:
        raise SettingsError("; ".join(read_elsewhere(settings, outcome) or read_elsewhere(settings)))
    queues = {queue.name: queue for queue in (results_queue(settings, each) for each in wanted)}
    declare_queues(app, list(queues.values()))
    with Store.open(settings) as store, app.connection_for_read() as connection:
        with unavailable_if_broker_fails("results"):
            channel = connection.default_channel
        yield Results([queue(channel) for queue in queues.values()], store.dead_letters)
