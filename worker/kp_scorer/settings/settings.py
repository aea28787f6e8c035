"""Joins the sections of the settings, checks the rules between them, and derives values from several of them."""

import json
from collections.abc import Iterator
from functools import cached_property
from hashlib import blake2b
from typing import Final, Self, get_args

from pydantic import model_validator

from kp_scorer.decision import KINDS, DecisionKind
from kp_scorer.limits import Limits
from kp_scorer.settings.section import Section
from kp_scorer.settings.sections import (
    ChecksSettings,
    EmbeddingSettings,
    GateSettings,
    LedgerSettings,
    LogSettings,
    MetricsSettings,
    NoveltySettings,
    ReviewSettings,
    RoutingSettings,
    ScoringSettings,
    ServeSettings,
    WorkerSettings,
)
from kp_scorer.settings.server_sections import BrokerSettings, QueueSettings, RedisSettings, ResultsSettings, intake_name
from kp_scorer.trace import PrivacyLevel

NO_VECTORS: Final = (
    'routing.gate: "coverage" compares vectors, and there is no embedder: set embedding.embedder to words, which needs no model'
)
_DECISION_BYTES: Final = 2_500  # The approximate size of a decision without its trace.


class Settings(Section):
    """All settings, frozen. A variable is named ``KP_<SECTION>_<NAME>``: ``KP_BROKER_URL``, ``KP_NOVELTY_MAX_ELEMENTS``."""

    broker: BrokerSettings = BrokerSettings()
    redis: RedisSettings = RedisSettings()
    queues: QueueSettings = QueueSettings()
    results: ResultsSettings = ResultsSettings()
    routing: RoutingSettings = RoutingSettings()
    gate: GateSettings = GateSettings()
    review: ReviewSettings = ReviewSettings()
    scoring: ScoringSettings = ScoringSettings()
    novelty: NoveltySettings = NoveltySettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    checks: ChecksSettings = ChecksSettings()
    ledger: LedgerSettings = LedgerSettings()
    worker: WorkerSettings = WorkerSettings()
    metrics: MetricsSettings = MetricsSettings()
    serve: ServeSettings = ServeSettings()
    log: LogSettings = LogSettings()

    def alike(self) -> str:
        """Return a digest of the settings in which all workers must agree, computed from those that are not the default."""
        own = {"embedding", "worker", "metrics", "serve", "log"}
        sections = self.model_dump(mode="json", exclude=own, exclude_defaults=True)
        # URLs hold passwords, and may name one server in several ways.
        shared = [(name, key, value) for name, section in sections.items() for key, value in section.items() if key != "url"]
        return blake2b(json.dumps(sorted(shared), sort_keys=True).encode(), digest_size=4).hexdigest()

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if clashes := [*self._clashes(), *self._clashes_of_names()]:
            raise ValueError("; ".join(clashes))
        return self

    def _clashes(self) -> Iterator[str]:
        if self.ledger.ttl_s < self.novelty.ttl_s:
            # A record that expires before its vector would let the same trace in again, with a second vector and decision.
            yield "ledger.ttl_s: expected at least novelty.ttl_s"
        if self.routing.gate == "coverage" and self.embedding.embedder == "none":
            yield NO_VECTORS
        if "secrets" in self.checks.own:
            yield "checks.own: secrets is set by checks.secrets"
        if self.worker.remote_control and not self.broker.url.startswith("amqp"):
            yield "worker.remote_control needs RabbitMQ: workers do not subscribe to anything in Redis"

    def _clashes_of_names(self) -> Iterator[str]:
        queues = self.queues
        names = {*queues.traces, *map(intake_name, queues.traces), *map(queues.name, KINDS)}
        parts = ("moving", "unacknowledged", "renewed", "deliveries", "oversized")
        beside = {f"{name}.{part}" for name in names for part in parts}
        for name in sorted(names):
            if name.startswith(f"{self.redis.prefix}:") or name in beside:
                yield f"queues: {name} is the name of a key that workers use in Redis themselves: choose another"

    @property
    def decision_timeout_s(self) -> float:
        """The time without progress after which a worker is stalled. Each check may have to start a new process."""
        return max(self.worker.stalled_after_s, len(self.checks.names) * (self.checks.timeout_s + self.checks.start_s))

    @cached_property
    def limits(self) -> Limits:
        """The limits of a submission, which follow from ``queues.message_bytes``."""
        return Limits.of(self.queues.message_bytes)

    @property
    def results_bytes(self) -> int:
        """The bytes of unread decisions that a queue or stream may hold if they carry traces; 0 if they do not."""
        return self.queues.results_limit * _DECISION_BYTES if self.results.with_trace else 0

    def is_ring(self, name: str) -> bool:
        """Return whether the queue or stream of this name drops its oldest decisions when it is full; otherwise workers wait.

        It does if rejected decisions or revisions go there. A queue of another app's tasks never does: the app may have other
        tasks on it.
        """
        return self.results.via != "task" and name not in (self.queues.name("accepted"), self.queues.name("review"))

    @property
    def kinds(self) -> tuple[DecisionKind, ...]:
        """The kinds that are published, except those of which these settings allow no decision.

        If a task is called, revisions are published like other decisions of their outcome, as another app declares its queues.
        """
        # A check that may reject demands review if it fails.
        demands = (demand for level in get_args(PrivacyLevel) for demand in self.checks.allowed(level).values())
        pinned = (each.beyond for each in self.novelty.pinned.values())
        is_demanded = self.review.sample or any(demands) or "review" in pinned
        is_reviewed = self.scoring.review is not None or self.scoring.reviews or is_demanded
        is_possible = {"accepted": True, "review": is_reviewed, "rejected": True, "revised": self.results.via != "task"}
        return tuple(each for each in self.results.publish if is_possible[each])
