"""All settings together, and what must hold between sections."""

from itertools import combinations
from typing import Self, get_args

from pydantic import model_validator

from kp_scorer.decision import Outcome
from kp_scorer.decoding import Limits
from kp_scorer.settings.policies import ScoringSettings, ShadowSettings
from kp_scorer.settings.sections import (
    BrokerSettings,
    EmbeddingSettings,
    HealthSettings,
    LedgerSettings,
    LogSettings,
    MetricsSettings,
    NoveltySettings,
    OtelSettings,
    QueueSettings,
    RedisSettings,
    ResultsSettings,
    Section,
    Via,
    WorkerSettings,
)


class Settings(Section):
    """All settings, frozen. A variable is named ``KP_<SECTION>_<NAME>``: ``KP_BROKER_URL``, ``KP_NOVELTY_MAX_ELEMENTS``."""

    broker: BrokerSettings = BrokerSettings()
    redis: RedisSettings = RedisSettings()
    queues: QueueSettings = QueueSettings()
    results: ResultsSettings = ResultsSettings()
    scoring: ScoringSettings = ScoringSettings()
    shadow: ShadowSettings = ShadowSettings()
    novelty: NoveltySettings = NoveltySettings()
    embedding: EmbeddingSettings = EmbeddingSettings()
    ledger: LedgerSettings = LedgerSettings()
    limits: Limits = Limits()
    worker: WorkerSettings = WorkerSettings()
    health: HealthSettings = HealthSettings()
    metrics: MetricsSettings = MetricsSettings()
    otel: OtelSettings = OtelSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _records_outlive_vectors(self) -> Self:
        # A record that expires before its vector would let the same trace in again, with a second vector and decision.
        if self.ledger.ttl_s < self.novelty.ttl_s:
            raise ValueError("ledger.ttl_s must be at least novelty.ttl_s")
        return self

    @model_validator(mode="after")
    def _what_has_one_name_is_one_thing(self) -> Self:
        for one, other in combinations(get_args(Outcome), 2):
            ways = {self.via(one), self.via(other)} - {"none"}
            if self.queues.name(one) == self.queues.name(other) and len(ways) > 1:
                raise ValueError(
                    f"results.{one}_via and results.{other}_via must be equal where queues.{one} and queues.{other} are"
                )
        return self

    @model_validator(mode="after")
    def _tasks_of_others_are_not_dropped(self) -> Self:
        for outcome in get_args(Outcome):
            if self.via(outcome) == "task" and self.queues.when_full(outcome) == "drop_oldest":
                raise ValueError(
                    f"queues.{outcome}_when_full must be 'wait' where results.{outcome}_via is 'task': "
                    "the oldest task on that queue may be somebody else's"
                )
        return self

    @model_validator(mode="after")
    def _what_nobody_waits_for_is_bounded(self) -> Self:
        if self.shadow.is_published and not self.queues.results_limit:
            raise ValueError("queues.results_limit must be above 0 where shadow.via is 'queue': nothing else bounds that queue")
        return self

    def via(self, outcome: Outcome) -> Via:
        """How decisions of this outcome are published; ``none`` also where ``queues`` says so by its older name for it."""
        return "none" if self.queues.when_full(outcome) == "none" else self.results.via(outcome)

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What can become of traces by these settings. Decisions from before they were changed may have others."""
        return tuple(each for each in get_args(Outcome) if each != "review" or self.scoring.reviews_any)
