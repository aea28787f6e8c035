"""The results queues and streams: publish decisions to them, and take decisions off queues."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, get_args

from celery import Celery
from kombu import Queue

from kp_scorer.broker.outbox import Outbox, StreamOutbox
from kp_scorer.broker.publishing import NoQueue, declare_queues, destination_of, unavailable_if_broker_fails, waiting
from kp_scorer.broker.queues import results_queue, results_queues, results_streams
from kp_scorer.broker.shadow_outbox import ShadowOutbox
from kp_scorer.broker.task_body import raw_body
from kp_scorer.decision import Decision, Outcome
from kp_scorer.decoding import Limits, parse_strict_json
from kp_scorer.errors import InvalidTrace, ScorerError, ServiceUnavailable, SettingsError
from kp_scorer.settings import Settings
from kp_scorer.spans import NO_CONTEXT, Context, Destination
from kp_scorer.store import DeadLetters, Publication, Store

_LIMITS: Final = Limits()
"""No decision comes near them, whatever those of traces are set to."""


class Publisher:
    """Publishes decisions. Safe to share between threads."""

    def __init__(self, app: Celery, settings: Settings, store: Store) -> None:
        """Publish through the app's connection pool, and to streams in ``store``, where what had to make room is counted."""
        queues, streams = results_queues(settings), results_streams(settings)
        # One outbox for each queue or stream, because several outcomes may go to the same one. One for review also where no
        # trace goes there any more: a decision may have been made before, and not been published.
        of_queues = {queue.name: Outbox(app, queue, settings, outcome, store.drops) for outcome, queue in queues.items()}
        of_streams = {
            name: StreamOutbox(store.decision_stream(name), settings.queues, outcome) for outcome, name in streams.items()
        }
        self._outboxes: dict[Outcome, Outbox | StreamOutbox] = {
            **{outcome: of_queues[queue.name] for outcome, queue in queues.items()},
            **{outcome: of_streams[name] for outcome, name in streams.items()},
        }
        self.destinations: Mapping[Outcome, Destination] = {
            **{outcome: destination_of(app, queue.name) for outcome, queue in queues.items()},
            **{outcome: Destination("redis", name) for outcome, name in streams.items()},
        }
        """Where decisions of an outcome go, if anywhere, as spans call it."""
        policy = settings.shadow.policy() if settings.shadow.is_published else None
        self.shadow = ShadowOutbox(app, settings, policy) if policy else None
        """What the shadow makes of decisions that are published waits here, if it goes anywhere, until it is published too."""

    def publish(self, decision: Decision, context: Context = NO_CONTEXT) -> None:
        """Put a decision on its outcome's queue, as :meth:`publish_all` does, or raise what that returns."""
        (error,) = self.publish_all([Publication(decision, context)])
        if error is not None:
            raise error

    def publish_all(self, publications: Sequence[Publication]) -> list[ScorerError | None]:
        """Put decisions where those of their outcome go, all of a queue or a stream in one round trip.

        On a queue each is a persistent JSON message, or one that calls a task of another app; its id is the trace's, and its
        header :data:`~kp_scorer.broker.outbox.MARK` is the decision's mark. On a stream each is an entry with fields for both.
        So are those of its context, if it has one.
        Returns once the broker, or Redis, has them. Decisions of an outcome that is not published are done with at once.

        Returns:
            For each decision None, or why it is not published: ServiceUnavailable if the broker or Redis cannot be reached, or
            the queue is full of unread decisions; SettingsError if RabbitMQ has a queue of this name with other arguments.
            Publish those again, which is safe, because consumers know a copy by its trace id and mark.
        """
        errors: list[ScorerError | None] = [None] * len(publications)
        for outbox in set(self._outboxes.values()):
            places = [
                place for place, (decision, _) in enumerate(publications) if self._outboxes.get(decision.outcome) is outbox
            ]
            if not places:
                continue
            try:
                taken = outbox.put_all([publications[place] for place in places])
            except (ServiceUnavailable, SettingsError) as error:
                errors = [error if place in places else found for place, found in enumerate(errors)]
                continue
            for place, is_taken in zip(places, taken, strict=True):
                errors[place] = None if is_taken else outbox.is_full()
        if self.shadow:
            self.shadow.take([decision for (decision, _), error in zip(publications, errors, strict=True) if error is None])
        return errors


def unread(app: Celery, settings: Settings, store: Store) -> dict[str, int]:
    """Count the unread decisions on each queue, and on each stream in ``store``, that they are published to, and that exists.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker or Redis cannot be reached.
    """
    queues = {queue.name: queue for queue in results_queues(settings, settings.outcomes).values()}
    counts = {}
    for name, queue in queues.items():
        with suppress(NoQueue):
            counts[name] = waiting(app, queue)
    streams = set(results_streams(settings, settings.outcomes).values())
    return counts | {name: store.decision_stream(name).unread() for name in sorted(streams)}


def read_elsewhere(settings: Settings, outcome: Outcome | None = None) -> list[str]:
    """How decisions of one outcome, or of all, are read that :func:`open_results` does not read; empty if it reads all."""
    found = []
    for each in [outcome] if outcome else settings.outcomes:
        name = settings.queues.name(each)
        if settings.via(each) == "stream":
            found.append(f"{each} decisions go to the stream {name} in the Redis of redis.url: read it with XREADGROUP")
        if settings.via(each) == "task":
            task = settings.results.task
            found.append(f"{each} decisions call the task {task} on the queue {name}: workers of its Celery app take them")
    return found


class Results:
    """Takes decisions off the results queues; what is none, and would be in the way for ever, becomes a dead letter."""

    def __init__(self, queues: Sequence[Queue], dead_letters: DeadLetters) -> None:
        """Take from these queues, which are bound to a channel."""
        self._queues = queues
        self._dead_letters = dead_letters
        self.set_aside = 0
        """How many messages were no decisions, so far."""

    def take(self) -> Iterator["Taken"]:
        """Yield what is on the queues now, each message once; a message returns to its queue unless acknowledged.

        Raises:
            ServiceUnavailable: the broker cannot be reached; or Redis cannot, when there is something to set aside.
        """
        for queue in self._queues:
            while (message := self._next(queue)) is not None:
                decision = _decision_in(message)
                if decision is None:
                    self._set_aside(queue.name, message)
                else:
                    yield Taken(message, decision)

    @staticmethod
    def _next(queue: Any) -> Any:
        with unavailable_if_broker_fails("results"):
            found = queue.channel.basic_get(queue.name)
        # Kombu's own way to get one raises an error for a body that it cannot decompress, again and again.
        return None if found is None else queue.channel.message_to_python(found)

    def _set_aside(self, queue: str, message: Any) -> None:
        self._dead_letters.bury(raw_body(message), "malformed", f"queue {queue}: expected a decision")
        with unavailable_if_broker_fails("results"):
            message.ack()
        self.set_aside += 1


def _decision_in(message: Any) -> dict[str, Any] | None:
    """The decision as the JSON object that was published, in an envelope or not; None if the message is none."""
    try:
        # Not by kombu's decoders, among which the message would choose.
        decision: Any = parse_strict_json(raw_body(message), _LIMITS)
        Decision.model_validate(decision)
    except (InvalidTrace, ValueError):
        return None
    return dict(decision)


class Taken:
    """A decision taken off a queue, as the JSON object that was published."""

    def __init__(self, message: Any, decision: dict[str, Any]) -> None:
        self._message = message
        self.decision = decision

    def acknowledge(self) -> None:
        """Remove the decision from its queue for good.

        Raises:
            ServiceUnavailable: the broker cannot be reached; the decision stays on its queue.
        """
        with unavailable_if_broker_fails("results"):
            self._message.ack()


@contextmanager
def open_results(app: Celery, settings: Settings, outcome: Outcome | None = None) -> Iterator[Results]:
    """Connect to the queue of one outcome, or to those of all that there are; streams, and tasks of other apps, are left alone.

    Raises:
        SettingsError: none of them is a queue, or RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker cannot be reached.
    """
    # Where decisions of one outcome are not published, others may go by its name.
    others = {settings.queues.name(each) for each in get_args(Outcome) if settings.via(each) in ("stream", "task")}
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
