"""The backlog: submissions and decisions on queues, pending submissions in the ledger, and the condition of Redis.

The functions raise the errors of :mod:`~kp_scorer.broker.calls`, and ServiceUnavailable if Redis cannot be reached.
"""

import math
import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from celery import Celery
from kombu import Exchange, Producer, Queue
from redis.exceptions import NoPermissionError

from kp_scorer.broker.calls import broker_condition, check_publishing, waiting, with_producer, with_redis
from kp_scorer.broker.queues import results_queues, results_streams, submission_queues
from kp_scorer.broker.redis_transport.queue import QueueKeys
from kp_scorer.errors import BrokerBlocked, NoQueue, Reason, SettingsError
from kp_scorer.settings import Settings
from kp_scorer.settings.server_sections import BrokerSettings, RedisSettings
from kp_scorer.store import Store
from kp_scorer.store.condition import Condition
from kp_scorer.store.connection import names_of
from kp_scorer.store.decision_stream import bytes_in
from kp_scorer.store.records import SubmissionCounts
from kp_scorer.store.store import WorkerReport


class UnreadDecisions(NamedTuple):
    """The unread decisions on each existing queue and stream, at one moment."""

    counts: Mapping[str, int]
    bytes: Mapping[str, int]  # The bytes that each takes in Redis. Queues on RabbitMQ are missing, as it reports no bytes.
    limit: int  # The most decisions that each accepts.
    most_bytes: int  # The most bytes that each accepts in Redis; 0 is no limit.
    full: tuple[str, ...]  # Those that accept no more, so that workers wait.
    rings: tuple[str, ...]  # Those that drop their oldest decisions when they are full, so that no worker waits.
    at_s: float  # The time of the measurement, by the monotonic clock.

    def used_bytes(self, name: str) -> float | None:
        """Return the fraction of its bytes in Redis that a queue or stream uses; None if they are not limited."""
        return self.bytes[name] / self.most_bytes if self.most_bytes and name in self.bytes else None

    def used(self, name: str) -> float:
        """Return the fraction of its limit that a queue or stream uses: in decisions or, if that is more, in bytes in Redis."""
        return max(self.counts[name] / self.limit, self.used_bytes(name) or 0.0)

    def full_in_s(self, name: str, earlier: "UnreadDecisions") -> float:
        """Return the seconds until a queue or stream is full, by its growth since ``earlier``; infinite if it has not grown."""
        shares = [
            (self.used_bytes(name) or 0.0, earlier.used_bytes(name) or 0.0),
            (self.counts[name] / self.limit, earlier.counts.get(name, 0) / self.limit),
        ]
        left_s = [max(0.0, 1 - now) * (self.at_s - earlier.at_s) / (now - then) for now, then in shares if now > then]
        return min(left_s, default=math.inf)


class Backlog(NamedTuple):
    """Everything that waits at one moment, and the condition of the servers that hold it."""

    submissions: Mapping[str, int]  # The messages on each queue of traces and each intake queue, without those in flight.
    submissions_used: Mapping[str, float]  # The fraction of its limit that each queue of traces uses, if it has one.
    unread: UnreadDecisions
    counts: SubmissionCounts  # The submissions in the ledger.
    oldest_pending_s: float  # The seconds since the oldest pending trace was last sent; 0 if there is none.
    dead_lettered: Mapping[Reason, int]  # The number of dead letters of each reason since the ledger began.
    servers: Mapping[str, Condition]  # The condition of each Redis: "redis", and "broker" if the queues have one of their own.
    blocked: str  # The reason why RabbitMQ accepts no messages; empty if it accepts them.
    # The bytes that each part takes on each server, estimated from a sample. ``other`` has the bytes that no part explains.
    used_by_part: Mapping[str, Mapping[str, int]]


def count_oversized(app: Celery, queues: Iterable[str]) -> dict[str, int]:
    """Return how many messages were too large for a worker, by the lists beside these queues in which Redis keeps them."""
    lists = [QueueKeys(name).oversized for name in queues]
    return with_redis(app, "oversized", lambda client: {each: int(client.llen(each)) for each in lists})


def lists_beside(app: Celery, queue: Queue) -> list[str]:
    """Return the names of lists on Redis that no worker consumes, although options of Celery put calls for this queue there.

    The options are ``priority_steps`` and ``sep``, if they lead to lists that no worker joins to the queue, and
    ``global_keyprefix``. This scans the names of all keys, and finds nothing for a user who may not scan.
    """

    def find(producer: Producer) -> list[str]:
        channel = producer.channel
        # With a pattern, Redis looks up the types of matching keys only. Looking up all types took most of the time.
        pattern = "*".join(["", *re.split(r"\W+", queue.name), ""])
        try:
            similar = {*names_of(channel.client, pattern, "list")} - {*channel.lists(queue.name)}
        except NoPermissionError:
            return []
        parts = re.compile(rf"(.*){re.escape(queue.name)}(?:\W+\d{{1,3}})?").fullmatch
        prefixes = {name: found[1] for name in similar if (found := parts(name))}
        beside = {name for name, prefix in prefixes.items() if not prefix or prefix.endswith(":")}
        if prefixes.keys() - beside:
            # A list with any other prefix may belong to another program. Name it only if kombu has a binding with the same
            # prefix.
            bound = {name.removesuffix(f"_kombu.binding.{queue.name}") for name in names_of(channel.client, pattern, "set")}
            beside |= {name for name, prefix in prefixes.items() if prefix in bound}
        return sorted(beside)

    return with_producer(app, queue.name, find)


def unread_decisions(app: Celery, settings: Settings, store: Store, reports: Sequence[WorkerReport]) -> UnreadDecisions:
    """Return the unread decisions on each queue and stream that decisions are published to, in two round trips for each.

    The ``reports`` of workers say which queues and streams have no room.
    """
    counts, used = {}, {}
    for name, queue in results_queues(settings, settings.kinds).items():
        with suppress(NoQueue):
            counts[name] = waiting(app, queue)
        if settings.broker.is_redis:
            used[name] = _bytes_on(app, name)
    for name in results_streams(settings, settings.kinds):
        stream = store.decision_stream(name)
        counts[name], used[name] = stream.count_unread(), stream.used_bytes()
    unread = UnreadDecisions(
        counts,
        used,
        settings.queues.results_limit,
        settings.results_bytes,
        full=(),
        rings=tuple(filter(settings.is_ring, counts)),
        at_s=time.monotonic(),
    )
    # On RabbitMQ, only a publisher notices that a queue's bytes are used up.
    without_room = {name for report in reports for name in report.full}
    full = (name for name in counts if unread.used(name) >= 1 or name in without_room)
    return unread._replace(full=tuple(name for name in full if name not in unread.rings))


def _bytes_on(app: Celery, key: str) -> int:
    return with_redis(app, key, lambda client: bytes_in(client, key))


def _used_by_part(
    app: Celery, settings: Settings, store: Store, spaces: Collection[str], decisions: int, servers: Mapping[str, Condition]
) -> dict[str, dict[str, int]]:
    """Measure the bytes of each part in each Redis, and add those of ``decisions``; empty if this user may not scan."""
    parts = {"redis": store.used_by_part(spaces)}
    if not parts["redis"]:
        return {}
    of_queues = "broker" if "broker" in servers else "redis"
    if settings.broker.is_redis:
        keys = (key for name in settings.queues.traces for key in QueueKeys(name).all)
        parts.setdefault(of_queues, {})["queues"] = sum(_bytes_on(app, key) for key in keys)
    if settings.results.via == "stream":
        parts["redis"]["decisions"] = decisions
    elif settings.broker.is_redis:
        parts[of_queues]["decisions"] = decisions
    used = {name: (servers[name].bytes_used or 0) for name in parts}
    return {name: each | {"other": max(0, used[name] - sum(each.values()))} for name, each in parts.items()}


def conditions(app: Celery, broker: BrokerSettings, redis: RedisSettings, store: Store) -> dict[str, Condition]:
    """Return the condition of the store's Redis, and that of the queues' Redis if it is another."""
    servers = {"redis": store.condition()}
    if broker.is_redis and broker.url != redis.url:
        servers["broker"] = broker_condition(app)
    return servers


def blocked(app: Celery, broker: BrokerSettings) -> str:
    """Return the reason why RabbitMQ accepts no messages; empty if it accepts them, or if the queues are in Redis."""
    if not broker.is_redis:
        try:
            check_publishing(app)
        except BrokerBlocked as error:
            return str(error)
    return ""


def _submissions(app: Celery, settings: Settings) -> dict[str, int]:
    submissions = {}
    for queues in submission_queues(settings.broker, settings.queues).values():
        submissions[queues.traces.name] = waiting(app, queues.traces)
        if queues.intake:
            # Declare the intake passively: a producer may have declared it with other arguments, which RabbitMQ would refuse
            # here, or as an exclusive one, which nobody else may look at.
            with suppress(NoQueue, SettingsError):
                intake = Queue(queues.intake.name, exchange=Exchange(""), no_declare=True)
                submissions[intake.name] = waiting(app, intake)
    return submissions


def look_at_backlog(app: Celery, settings: Settings, store: Store, reports: Sequence[WorkerReport]) -> Backlog:
    """Measure the backlog; ``reports`` say which queues have no room, and which novelty logs exist.

    It takes one or two round trips for each queue, and about ten to measure memory.
    """
    # A worker passes its own report only: if each of many workers read all reports, Redis would do little else.
    unread = unread_decisions(app, settings, store, reports)
    servers = conditions(app, settings.broker, settings.redis, store)
    spaces = {report.space for report in reports if report.space}
    submissions = _submissions(app, settings)
    return Backlog(
        submissions=submissions,
        submissions_used={name: submissions[name] / each.limit for name, each in settings.queues.traces.items() if each.limit},
        unread=unread,
        counts=store.ledger.counts(),
        oldest_pending_s=store.ledger.oldest_pending_s(),
        dead_lettered=store.dead_letters.dead_lettered(),
        servers=servers,
        blocked=blocked(app, settings.broker),
        used_by_part=_used_by_part(app, settings, store, spaces, sum(unread.bytes.values()), servers),
    )
