"""The queues, and how they differ between Redis and RabbitMQ."""

from collections.abc import Sequence
from typing import Any, NamedTuple, get_args

from kombu import Exchange, Queue

from kp_scorer.decision import Outcome
from kp_scorer.settings import Settings


class SubmissionQueues(NamedTuple):
    """The queues that must exist before a trace is submitted or taken."""

    traces: Queue
    """The queue that workers consume; on RabbitMQ bound to an exchange of its own name, by its own name."""
    dead: Queue | None
    """Where RabbitMQ puts messages delivered too often; None on Redis, where the workers count deliveries."""

    intake: Queue | None
    """From where workers move messages to ``traces``, for producers that declare the queue they send to; None on Redis."""

    @property
    def in_order(self) -> list[Queue]:
        """The queues that a submission needs, ``dead`` first: RabbitMQ would drop what it moves to one that is not declared."""
        return [self.traces] if self.dead is None else [self.dead, self.traces]


def submission_queues(settings: Settings) -> SubmissionQueues:
    """The queues that submissions need."""
    queues = settings.queues
    if settings.broker.is_redis:
        return SubmissionQueues(_queue(queues.traces), None, None)
    arguments = {
        # RabbitMQ counts how often a message has come back, which is one less than its deliveries.
        "x-delivery-limit": settings.broker.delivery_limit - 1,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queues.dead,
        # By default RabbitMQ drops a message that the dead-letter queue does not accept at once.
        "x-dead-letter-strategy": "at-least-once",
    }
    # Its own exchange, because whoever may write to the default one can send to any queue.
    traces = _quorum_queue(queues.traces, arguments, exchange=queues.traces)
    # Without arguments, as every client declares a durable queue by default: RabbitMQ refuses who declares it otherwise.
    return SubmissionQueues(traces, _quorum_queue(queues.dead), _queue(queues.intake_name))


def results_queue(settings: Settings, outcome: Outcome) -> Queue:
    """The queue of decisions with this outcome.

    On RabbitMQ one of ours holds at most ``queues.results_limit``, unless that is 0. One by which tasks of another app are
    called is that app's to declare, as no one else knows its arguments.
    """
    queues = settings.queues
    name = settings.queues.name(outcome)
    if settings.broker.is_redis:
        return _queue(name)
    if settings.via(outcome) == "task":
        return _queue(name, declare=False)
    return _quorum_queue(name, {"x-max-length": queues.results_limit} if queues.results_limit else {})


def results_queues(settings: Settings, outcomes: Sequence[Outcome] = get_args(Outcome)) -> dict[Outcome, Queue]:
    """The queue of each outcome whose decisions go to one, as messages or as calls of a task; some may have the same name."""
    by_queue = [outcome for outcome in outcomes if settings.via(outcome) in ("queue", "task")]
    return {outcome: results_queue(settings, outcome) for outcome in by_queue}


def results_streams(settings: Settings, outcomes: Sequence[Outcome] = get_args(Outcome)) -> dict[Outcome, str]:
    """The name of the stream of each outcome whose decisions go to one; some may be the same."""
    return {outcome: settings.queues.name(outcome) for outcome in outcomes if settings.via(outcome) == "stream"}


def shadow_queue(settings: Settings) -> Queue:
    """The queue of the shadow's decisions; on RabbitMQ one where the oldest make room by themselves."""
    queues = settings.queues
    if settings.broker.is_redis:
        return _queue(queues.shadow)
    return _quorum_queue(queues.shadow, {"x-max-length": queues.results_limit, "x-overflow": "drop-head"})


def _queue(name: str, arguments: dict[str, Any] | None = None, exchange: str = "", *, declare: bool = True) -> Queue:
    """A durable queue. On the default exchange it is a plain list on Redis: no binding set, whose loss would drop messages."""
    return Queue(name, exchange=Exchange(exchange), routing_key=name, queue_arguments=arguments, no_declare=not declare)


def _quorum_queue(name: str, arguments: dict[str, Any] | None = None, exchange: str = "") -> Queue:
    return _queue(name, {"x-queue-type": "quorum", "x-overflow": "reject-publish", **(arguments or {})}, exchange)
