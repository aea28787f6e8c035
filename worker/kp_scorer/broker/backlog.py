"""The backlog: submissions and decisions on queues, pending submissions in the ledger, and the condition of Redis.

The functions raise the errors of :mod:`~kp_scorer.broker.calls`, and ServiceUnavailable if Redis cannot be reached.
"""

import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Final, NamedTuple

from celery import Celery
from kombu import Exchange, Producer, Queue
from redis.exceptions import NoPermissionError

from kp_scorer.broker.calls import broker_condition, check_publishing, waiting, with_producer
from kp_scorer.broker.queues import results_queues, results_streams, submission_queues
from kp_scorer.broker.redis_transport.queue import QueueKeys
from kp_scorer.errors import BrokerBlocked, NoQueue, Reason
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import BrokerSettings, RedisSettings
from kp_scorer.store import Store
from kp_scorer.store.condition import Condition
from kp_scorer.store.decision_stream import bytes_in
from kp_scorer.store.store import WorkerReport

_SCANNED_AT_ONCE: Final = 1_000


class Backlog(NamedTuple):
    """The numbers of messages and submissions that wait at one moment."""

    submissions: Mapping[str, int]  # By queue: the queues of traces and the intake queues. Messages in flight do not count.
    decisions: Mapping[str, int]  # Unread decisions, by queue or stream.
    full: tuple[str, ...]  # The queues and streams that accept no more decisions, so that workers wait.
    pending: int  # Submissions in the ledger that are neither decided nor dead.
    oldest_pending_s: float  # The age of the oldest of these; 0 if there is none.
    servers: Mapping[str, Condition]  # The condition of each Redis: "redis", and "broker" if the queues have one of their own.
    blocked: str = ""  # Why RabbitMQ accepts no messages; empty if it does.
    limit: int = 100_000  # The most unread decisions that each queue or stream accepts.
    # By queue or stream: the used share of its bytes in Redis, if these are limited.
    used_bytes: Mapping[str, float] = MappingProxyType({})
    dead_lettered: Mapping[Reason, int] = MappingProxyType({})  # By reason: the number of dead letters since the ledger began.
    # The queues and streams that drop their oldest decisions when they are full, so that no worker waits.
    rings: tuple[str, ...] = ()
    # By server and part: the bytes that the part takes there, by a sample. ``other`` is what no part explains.
    used_by_part: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    at_s: float = 0.0  # The time of the measurement, by the monotonic clock.

    def used(self, name: str) -> float:
        """Return the used share of a queue or stream of decisions: of its places or, if that is more, of its bytes in Redis."""
        return max(self.decisions[name] / self.limit, self.used_bytes.get(name, 0.0))

    def full_in_s(self, name: str, earlier: "Backlog") -> float:
        """Return the seconds until a queue or stream is full at its growth since ``earlier``; infinite if it does not grow."""
        shares = [
            (self.used_bytes.get(name, 0.0), earlier.used_bytes.get(name, 0.0)),
            (self.decisions[name] / self.limit, earlier.decisions.get(name, 0) / self.limit),
        ]
        left_s = [max(0.0, 1 - now) * (self.at_s - earlier.at_s) / (now - then) for now, then in shares if now > then]
        return min(left_s, default=math.inf)


def count_oversized(app: Celery, settings: Settings) -> dict[str, int]:
    """Return by list the numbers of messages that were too large for a worker and are kept beside their queue on Redis."""
    lists = [QueueKeys(name).oversized for name in settings.queues.traces]
    return with_producer(app, "oversized", lambda producer: {each: int(producer.channel.client.llen(each)) for each in lists})


def lists_beside(app: Celery, queue: Queue) -> list[str]:
    """Return the names of lists on Redis that no worker consumes, although options of Celery put calls for this queue there.

    These options are ``priority_steps`` and ``sep``, where they lead to lists that no worker joins to the queue, and
    ``global_keyprefix``. Redis looks through the names of all keys, for a user who may list them.
    """

    def find(producer: Producer) -> list[str]:
        channel = producer.channel
        joined = {channel._q_for_pri(queue.name, priority) for priority in channel.priority_steps}  # noqa: SLF001 - kombu's own
        is_beside = re.compile(rf"(.*:)?{re.escape(queue.name)}(\W+\d{{1,3}})?").fullmatch
        # A pattern spares Redis the types of all other keys, which took most of the time.
        pattern = "*".join(["", *re.split(r"\W+", queue.name), ""])
        names: set[str] = set()
        with suppress(NoPermissionError):
            names.update(name.decode(errors="replace") for name in channel.client.scan_iter(pattern, _SCANNED_AT_ONCE, "list"))
        return sorted(filter(is_beside, names - joined))

    return with_producer(app, queue.name, find)


def unread(app: Celery, settings: Settings, store: Store) -> dict[str, int]:
    """Count the unread decisions on each existing queue and stream that decisions are published to."""
    counts = {}
    for queue in results_queues(settings, settings.kinds).values():
        with suppress(NoQueue):
            counts[queue.name] = waiting(app, queue)
    return counts | {name: store.decision_stream(name).count_unread() for name in results_streams(settings, settings.kinds)}


def _decision_bytes(app: Celery, settings: Settings, store: Store) -> dict[str, int]:
    """Return the bytes of each queue and stream of decisions; without queues on RabbitMQ, which reports no bytes."""
    used = {name: store.decision_stream(name).used_bytes() for name in results_streams(settings, settings.kinds)}
    if settings.broker.is_redis:
        used |= {name: _bytes_on(app, name) for name in results_queues(settings, settings.kinds)}
    return used


def _bytes_on(app: Celery, key: str) -> int:
    return with_producer(app, key, lambda producer: bytes_in(producer.channel.client, key))


def _used_by_part(
    app: Celery, settings: Settings, store: Store, spaces: Collection[str], decisions: int, servers: Mapping[str, Condition]
) -> dict[str, dict[str, int]]:
    """Measure what each part takes in each Redis, beside the bytes of ``decisions``; empty if this user may not look."""
    parts = {"redis": store.used_by_part(spaces)}
    if not parts["redis"]:
        return {}
    on_broker = parts.setdefault("broker" if "broker" in servers else "redis", {}) if settings.broker.is_redis else {}
    if settings.broker.is_redis:
        on_broker["queues"] = sum(_bytes_on(app, key) for name in submission_queues(settings) for key in QueueKeys(name).all)
    # Streams are in the Redis of the ledger.
    (parts["redis"] if settings.results.via == "stream" else on_broker)["decisions"] = decisions
    used = {name: (servers[name].bytes_used or 0) for name in parts}
    return {name: each | {"other": max(0, used[name] - sum(each.values()))} for name, each in parts.items()}


def conditions(app: Celery, broker: BrokerSettings, redis: RedisSettings, store: Store) -> dict[str, Condition]:
    """Read the condition of the store's Redis, and that of the queues' Redis if it is another."""
    servers = {"redis": store.condition()}
    if broker.is_redis and broker.url != redis.url:
        servers["broker"] = broker_condition(app)
    return servers


def blocked(app: Celery, broker: BrokerSettings) -> str:
    """Return why RabbitMQ accepts no messages; empty if it accepts them, or the queues are in Redis."""
    if not broker.is_redis:
        try:
            check_publishing(app)
        except BrokerBlocked as error:
            return str(error)
    return ""


def _submissions(app: Celery, settings: Settings) -> dict[str, int]:
    submissions = {}
    for queues in submission_queues(settings).values():
        submissions[queues.traces.name] = waiting(app, queues.traces)
        if queues.intake:
            # Passively: producers declare this queue, perhaps with other arguments.
            with suppress(NoQueue):
                intake = Queue(queues.intake.name, exchange=Exchange(""), no_declare=True)
                submissions[intake.name] = waiting(app, intake)
    return submissions


def look_at_backlog(app: Celery, settings: Settings, store: Store, reports: Sequence[WorkerReport] | None = None) -> Backlog:
    """Measure the backlog, in one or two round trips for each queue and some ten for what takes memory.

    ``reports`` are those of the workers that say which queues have no room, and which logs there are; by default all are read.
    """
    decisions = unread(app, settings, store)
    limit = settings.queues.results_limit
    decision_bytes, most_bytes = _decision_bytes(app, settings, store), settings.results_bytes
    used_bytes = {name: size_bytes / most_bytes for name, size_bytes in decision_bytes.items()} if most_bytes else {}
    # On RabbitMQ, only a publisher notices that a queue's bytes are used up. A worker passes its own report: if each of many
    # workers read those of all, Redis would do little else.
    reports = store.worker_reports() if reports is None else reports
    full = {name for name, count in decisions.items() if count >= limit or used_bytes.get(name, 0.0) >= 1}
    full.update(name for report in reports for name in report.full)
    servers = conditions(app, settings.broker, settings.redis, store)
    spaces = {report.space for report in reports if report.space}
    return Backlog(
        submissions=_submissions(app, settings),
        decisions=decisions,
        full=tuple(name for name in decisions if name in full and not settings.is_ring(name)),
        pending=store.ledger.counts().pending,
        oldest_pending_s=store.ledger.oldest_pending_s(),
        servers=servers,
        blocked=blocked(app, settings.broker),
        limit=limit,
        used_bytes=used_bytes,
        dead_lettered=store.dead_letters.dead_lettered(),
        rings=tuple(filter(settings.is_ring, decisions)),
        used_by_part=_used_by_part(app, settings, store, spaces, sum(decision_bytes.values()), servers),
        at_s=time.monotonic(),
    )
