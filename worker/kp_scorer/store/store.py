"""All of the scorer's state in one Redis, and the reports of workers."""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import redis
from pydantic import BaseModel

from kp_scorer.decision import Decision, Outcome
from kp_scorer.endpoints import with_endpoints
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.condition import Condition, condition_of
from kp_scorer.store.connection import connect, in_one_trip, names_of, reports_outages
from kp_scorer.store.copies import Copies
from kp_scorer.store.dead_letters import DeadLetters
from kp_scorer.store.decision_stream import DecisionStream
from kp_scorer.store.fact_streams import RedisFacts
from kp_scorer.store.keys import Keys
from kp_scorer.store.ledger import RedisLedger
from kp_scorer.store.novelty_log import RedisLog
from kp_scorer.store.pinned_sets import RedisPinnedSets, describe_pinned_sets
from kp_scorer.store.records import parsed_in
from kp_scorer.store.runs import Runs
from kp_scorer.store.usage import used_by_part


class Timing(BaseModel, frozen=True):
    """The number of events of a kind, and the seconds that they took in total."""

    count: int = 0
    seconds: float = 0.0


class WorkerReport(BaseModel, frozen=True, extra="ignore"):
    """The state of a worker, and its work since its start. Fields of other versions are ignored."""

    node: str  # Its name in Celery.
    not_ready: tuple[str, ...] = ()  # The reasons why it takes no work; empty if it takes work.
    full: tuple[str, ...] = ()  # The queues and streams that have no room for its decisions.
    failing: dict[str, str] = {}  # Its periodic work that failed at the last attempt, with the error.
    settings: str = ""  # A digest of the settings in which workers must agree.
    space: str = ""  # The space of its vectors; empty without an embedder.
    embedder: str = ""  # Name and engine; empty without an embedder.
    in_flight: int = 0
    window_entries: int = 0  # The entries of the novelty log in its mirror.
    decisions: dict[Outcome, dict[str, int]] = {}  # The numbers of its decisions, by outcome and domain.
    dead_letters: int = 0
    redeliveries: int = 0
    queued: Timing = Timing()  # From sending to delivery, for messages that say when they were sent.
    held: Timing = Timing()  # From the delivery of a message to the publication of its decision.
    embedded: Timing = Timing()


@reports_outages("redis.url")
class Store(AbstractContextManager["Store"]):
    """All of the scorer's state under one prefix, connected on first use. Methods raise ServiceUnavailable without Redis."""

    def __init__(self, client: redis.Redis, settings: Settings) -> None:
        """Take over ``client``, which :meth:`close` closes."""
        self._client = client
        self._settings = settings
        self._keys = Keys(settings.redis.prefix)
        self.ledger = RedisLedger(client, self._keys, settings.ledger.ttl_ms)
        self.dead_letters = DeadLetters(client, self._keys, settings.ledger)
        self.runs = Runs(client, self._keys, settings.serve)
        self.copies = Copies(client, self._keys)

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Open a store in the Redis that the settings name."""
        return cls(connect(settings.redis, settings.broker.timeout_s), settings)

    def ping(self) -> None:
        """Raise ServiceUnavailable unless Redis answers."""
        self._client.ping()

    def condition(self) -> Condition:
        """Return the memory and the shortcomings of this Redis."""
        return condition_of(self._client)

    def worker_reports(self) -> list[WorkerReport]:
        """Return the reports of all workers that are alive, sorted by node."""
        workers: Any = self._client.zrange(self._keys.workers, 0, -1)
        texts = in_one_trip(self._client, (("GET", self._keys.worker(worker.decode())) for worker in workers))
        # A worker may have died since, and then its report has expired.
        reports = [parsed_in(WorkerReport, text) for text in texts if text]
        return sorted(filter(None, reports), key=lambda report: report.node)

    def used_by_part(self, spaces: Collection[str]) -> dict[str, int]:
        """Return the bytes of records, logs of these spaces, dead letters and open runs; empty for a user who may not scan."""
        return used_by_part(self._client, self._keys, spaces, list(self._settings.novelty.pinned))

    def decision_stream(self, name: str) -> DecisionStream:
        """Return a stream of decisions, which need not exist yet."""
        return DecisionStream(self._client, name)

    def novelty_log(self, space: str) -> RedisLog:
        """Return the log of a space, which need not exist yet."""
        return RedisLog(self._client, self._keys, space, self._settings.novelty.window(), self._settings.ledger.ttl_ms)

    def novelty_logs(self) -> list[RedisLog]:
        """Return the logs that have entries, sorted by space."""
        return [self.novelty_log(space) for space in self._spaces(self._keys.any_log)]

    def facts(self, space: str) -> RedisFacts:
        """Return the facts of a space, which need not exist yet."""
        return RedisFacts(self._client, self._keys, space, self._settings.gate.bounds)

    def all_facts(self) -> list[RedisFacts]:
        """Return the facts of all spaces that have some, sorted by space."""
        return [self.facts(space) for space in self._spaces(self._keys.any_facts)]

    def pinned_sets(self, space: str) -> RedisPinnedSets:
        """Return the pinned sets of a space."""
        return RedisPinnedSets(self._client, self._keys, space)

    def all_pinned_sets(self) -> list[dict[str, Any]]:
        """Return a description of each pinned set, sorted by space and name."""
        return list(describe_pinned_sets(self._client, self._keys))

    def _spaces(self, pattern: str) -> list[str]:
        streams = (key for key in names_of(self._client, pattern, "stream") if not key.endswith((":head", ":erased", ":kept")))
        return sorted({key.removeprefix(pattern.removesuffix("*")) for key in streams if self._client.xlen(key)} - {""})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def stored_decisions(settings: Settings | None = None) -> Iterator[Decision]:
    """Yield every decision in the ledger once, in no order. A decision that is made meanwhile may be missing.

    Damaged records are left out.

    Args:
        settings: by default those of the environment and the configuration file.

    Raises:
        SettingsError: a setting is wrong, or none names a Redis.
        ServiceUnavailable: Redis cannot be reached.
    """
    # Redis returns some keys twice while it shrinks their table.
    read = set[str]()
    with Store.open(with_endpoints(settings or load_settings())) as store:
        for decided in store.ledger.all_decided():
            if decided.decision.trace_id not in read:
                read.add(decided.decision.trace_id)
                yield decided.decision


def stored_labels(settings: Settings | None = None) -> dict[str, bool]:
    """Return the labels in the ledger by trace id: True is good. Argument and errors are those of ``stored_decisions``."""
    with Store.open(with_endpoints(settings or load_settings())) as store:
        labelled = store.ledger.all_decided(store.ledger.labelled())
        return {each.decision.trace_id: each.good for each in labelled if each.good is not None}
