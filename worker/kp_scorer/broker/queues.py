"""Defines the queues, and their differences between Redis and RabbitMQ."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kombu import Exchange, Queue

from kp_scorer.decision import DecisionKind
from kp_scorer.settings import Settings
from kp_scorer.settings.server_sections import BrokerSettings, QueueSettings, dead_name, intake_name

_UNLIMITED: Final = 1_000_000_000
"""No limit on the deliveries of a message; the ledger's attempts end a poison trace instead.

By default RabbitMQ 4.0 drops a message after 20 deliveries, and older versions refuse the limit -1 (rabbitmq-server#12250).
"""


class SubmissionQueues(NamedTuple):
    """The queues that must exist before a trace is submitted to, or consumed from, one queue of traces."""

    traces: Queue  # The queue that workers consume; on RabbitMQ bound to an exchange of the same name, by that name.
    dead: Queue | None  # RabbitMQ puts messages here that expire or have no room; None on Redis.
    intake: Queue | None  # For producers that declare a queue; workers move its messages to ``traces``. None on Redis.
    limit: int  # The most traces that may wait; 0 without a limit.

    @property
    def in_order(self) -> list[Queue]:
        """The queues that a submission needs, ``dead`` first: RabbitMQ drops messages that it moves to an undeclared queue."""
        return [self.traces] if self.dead is None else [self.dead, self.traces]

    @property
    def passive_traces(self) -> Queue:
        """The queue of traces for users who may count its messages but not declare it, such as clients on RabbitMQ."""
        return _queue(self.traces.name, declare=self.dead is None)


def submission_queues(broker: BrokerSettings, queues: QueueSettings) -> dict[str, SubmissionQueues]:
    """Return the queues that submissions need, keyed by the name of each queue of traces."""
    return {name: _queues_of(name, queue.limit, broker) for name, queue in queues.traces.items()}


def _queues_of(name: str, limit: int, broker: BrokerSettings) -> SubmissionQueues:
    if broker.is_redis:
        return SubmissionQueues(_queue(name), None, None, limit)
    arguments = {
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": dead_name(name),
        # By default RabbitMQ drops a message that the dead-letter queue does not accept at once.
        "x-dead-letter-strategy": "at-least-once",
        **({"x-max-length": limit} if limit else {}),
    }
    # The queue has an exchange of its own, because a user who may write to the default exchange can send to any queue.
    traces = _quorum_queue(name, arguments, exchange=name)
    # By default, clients declare a durable queue without arguments, so the intake is one: RabbitMQ refuses a declaration that
    # differs.
    return SubmissionQueues(traces, _quorum_queue(dead_name(name)), _queue(intake_name(name)), limit)


def results_queue(settings: Settings, kind: DecisionKind) -> Queue:
    """Return the queue of decisions of this kind.

    On RabbitMQ, a queue of our own with ``queues.results_limit`` refuses further messages, or drops the oldest if it is a ring.
    A queue for calls of another app's task is declared by that app, which alone knows its arguments.
    """
    name = settings.queues.name(kind)
    if settings.broker.is_redis or settings.results.via == "task":
        return _queue(name, declare=settings.broker.is_redis)
    arguments: dict[str, Any] = {"x-max-length": settings.queues.results_limit}
    if settings.results.with_trace:
        arguments["x-max-length-bytes"] = settings.results_bytes
    if settings.is_ring(name):
        arguments["x-overflow"] = "drop-head"
    return _quorum_queue(name, arguments)


def results_queues(settings: Settings, kinds: Sequence[DecisionKind]) -> dict[str, Queue]:
    """Return the queues, by name, to which decisions of these kinds go, as messages or as calls of a task."""
    if settings.results.via == "stream":
        return {}
    return {settings.queues.name(kind): results_queue(settings, kind) for kind in kinds}


def results_streams(settings: Settings, kinds: Sequence[DecisionKind]) -> list[str]:
    """Return the names of the streams to which decisions of these kinds go."""
    return list(map(settings.queues.name, kinds)) if settings.results.via == "stream" else []


def system_of(broker: BrokerSettings) -> str:
    """Return the name that spans use for the system of a broker: ``redis`` or ``rabbitmq``."""
    return "redis" if broker.is_redis else "rabbitmq"


def _queue(name: str, arguments: dict[str, Any] | None = None, exchange: str = "", *, declare: bool = True) -> Queue:
    """Return a durable queue. On Redis, a queue of the default exchange is a plain list, and has no bindings to lose."""
    return Queue(name, exchange=Exchange(exchange), routing_key=name, queue_arguments=arguments, no_declare=not declare)


def _quorum_queue(name: str, arguments: dict[str, Any] | None = None, exchange: str = "") -> Queue:
    defaults = {"x-queue-type": "quorum", "x-overflow": "reject-publish", "x-delivery-limit": _UNLIMITED}
    return _queue(name, {**defaults, **(arguments or {})}, exchange)
