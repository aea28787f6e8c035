"""The sections of the settings: their names, types and defaults, and what must hold within each."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from kp_scorer.decision import Dimensions, Outcome
from kp_scorer.decoding import Count
from kp_scorer.novelty import Window
from kp_scorer.scoring import DEFAULT_THRESHOLD, PROFILES, Policy, check_weights
from kp_scorer.trace import Fraction
from kp_scorer.urls import BROKER_SCHEMES, REDIS_SCHEMES, ServerUrl, parse_url

Seconds = Annotated[float, Field(gt=0)]
RecipeName = Literal["trace", "asked_and_did"]
VectorType = Literal["float32", "float16"]
WhenFull = Literal["wait", "drop_oldest", "none"]
Via = Literal["queue", "stream", "task", "none"]
QueueName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,200}$")]


def _server(*schemes: str) -> Callable[[str], str]:
    def check(url: str) -> str:
        if url:
            parse_url(url, schemes)
        return url

    return check


class Section(BaseModel):
    """Frozen, and with no names but its own. What is wrong is told without the value, which may be a secret."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class BrokerSettings(Section):
    """The broker that traces come from and decisions go to."""

    url: Annotated[str, AfterValidator(_server(*BROKER_SCHEMES)), Field(repr=False)] = ""
    visibility_timeout_s: Annotated[int, Field(ge=3)] = 60
    delivery_limit: Count = 20
    hold_s: Seconds = 600.0
    timeout_s: Seconds = 5.0
    submit_timeout_s: Seconds = 5.0

    @property
    def is_redis(self) -> bool:
        """Whether the queues are in Redis; otherwise the broker speaks AMQP."""
        return self.url.startswith("redis")

    def server(self) -> ServerUrl:
        """The URL, which must be filled in, taken apart."""
        return parse_url(self.url, BROKER_SCHEMES)


class RedisSettings(Section):
    """Where the novelty log and the ledger live."""

    url: Annotated[str, AfterValidator(_server(*REDIS_SCHEMES)), Field(repr=False)] = ""
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "kp"
    timeout_s: Seconds = 5.0

    def server(self) -> ServerUrl:
        """The URL, which must be filled in, taken apart."""
        return parse_url(self.url, REDIS_SCHEMES)


class QueueSettings(Section):
    """The queues: their names, and what happens when nobody reads decisions."""

    traces: QueueName = "traces"
    intake: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{0,200}$")] = ""
    accepted: QueueName = "decisions.accepted"
    review: QueueName = "decisions.review"
    rejected: QueueName = "decisions.rejected"
    shadow: QueueName = "decisions.shadow"
    dead: QueueName = "traces.dead"
    results_limit: Annotated[int, Field(ge=0)] = 100_000
    accepted_when_full: WhenFull = "wait"
    review_when_full: WhenFull = "wait"
    rejected_when_full: WhenFull = "wait"

    @model_validator(mode="after")
    def _queues_of_different_kinds_differ(self) -> Self:
        # Workers take everything on the queue of traces for a submission.
        of_submissions = {self.traces, self.intake_name, self.dead}
        if len(of_submissions) < 3 or of_submissions & set(map(self.name, get_args(Outcome))):
            raise ValueError("traces, intake, dead and the queues of decisions need names of their own")
        # Whoever reads decisions would take those of the shadow for what was decided.
        if self.shadow in of_submissions.union(map(self.name, get_args(Outcome))):
            raise ValueError("shadow needs a name of its own")
        return self

    @model_validator(mode="after")
    def _one_queue_has_one_policy(self) -> Self:
        for one, other in combinations(get_args(Outcome), 2):
            if self.name(one) == self.name(other) and self.when_full(one) != self.when_full(other):
                raise ValueError(f"{one}_when_full and {other}_when_full must be equal where {one} and {other} are one queue")
        return self

    def name(self, outcome: Outcome) -> str:
        """What the queue, or the stream, of decisions with this outcome is called."""
        return {"accepted": self.accepted, "review": self.review, "rejected": self.rejected}[outcome]

    @property
    def intake_name(self) -> str:
        """The name of the intake queue; unless it is given, fleets with different queues of traces share none."""
        return self.intake or f"{self.traces}.intake"

    def when_full(self, outcome: Outcome) -> WhenFull:
        """What to do with a decision of this outcome when its queue is full."""
        by_outcome: dict[Outcome, WhenFull] = {
            "accepted": self.accepted_when_full,
            "review": self.review_when_full,
            "rejected": self.rejected_when_full,
        }
        return by_outcome[outcome]

    def is_full(self, unread: int) -> bool:
        """Whether a queue with so many unread decisions takes no more."""
        return 0 < self.results_limit <= unread


class ResultsSettings(Section):
    """How decisions reach those who read them."""

    accepted_via: Via = "queue"
    review_via: Via = "queue"
    rejected_via: Via = "queue"
    task: Annotated[str, Field(pattern=r"^[!-~]{0,255}$")] = ""
    plain: bool = False

    @model_validator(mode="after")
    def _a_task_has_a_name(self) -> Self:
        for outcome in get_args(Outcome):
            if self.via(outcome) == "task" and not self.task:
                raise ValueError(f"task must be the name of the task to call where {outcome}_via is 'task'")
        return self

    def via(self, outcome: Outcome) -> Via:
        """How decisions of this outcome are published, if they are."""
        return {"accepted": self.accepted_via, "review": self.review_via, "rejected": self.rejected_via}[outcome]


class PolicySettings(Section):
    """Thresholds, weights, and what domains are taken for."""

    threshold: Fraction = DEFAULT_THRESHOLD
    thresholds: dict[str, Fraction] = {}
    review: Fraction | None = None
    reviews: dict[str, Fraction] = {}
    profiles: dict[str, Dimensions] = {}
    aliases: dict[str, str] = {}

    @field_validator("profiles")
    @classmethod
    def _weights_sum_to_one(cls, profiles: dict[str, Dimensions]) -> dict[str, Dimensions]:
        for name, weights in profiles.items():
            try:
                check_weights(weights)
            except ValueError as error:
                raise ValueError(f"profile {name!r}: {error}") from None
        return profiles

    @model_validator(mode="after")
    def _reviews_are_below_thresholds(self) -> Self:
        # One that is above would have nothing reviewed, and nobody would know why.
        if clashes := list(self.reviews_above(self.threshold, self.thresholds)):
            raise ValueError("; ".join(clashes))
        return self

    @model_validator(mode="after")
    def _aliases_lead_to_what_has_something_of_its_own(self) -> Self:
        own = {*PROFILES, *self.profiles, *self.thresholds, *self.reviews}
        for alias, domain in self.aliases.items():
            if alias in own:
                raise ValueError(f"aliases.{alias}: expected a name without a profile, a threshold or a review of its own")
            if domain not in own:
                # Nor may it be an alias, so that one look tells what a domain is taken for.
                raise ValueError(f"aliases.{alias}: expected a domain with a profile, a threshold or a review, got {domain!r}")
        return self

    def reviews_above(self, default: float, thresholds: Mapping[str, float]) -> Iterator[str]:
        """Say of each review that is above one of these thresholds what is wrong with it."""
        for domain in dict.fromkeys(("", *thresholds, *self.reviews)):
            threshold, review = thresholds.get(domain, default), self.reviews.get(domain, self.review)
            if review is not None and review > threshold:
                where = f"reviews.{domain}" if domain else "review"
                yield f"{where}: expected at most the threshold of {threshold:g}, got {review:g}"

    def _policy(self) -> Policy:
        """The scoring policy these settings describe; profiles given here are added to, or replace, the built-in ones."""
        return Policy(
            profiles={**PROFILES, **self.profiles},
            threshold=self.threshold,
            thresholds=self.thresholds,
            review=self.review,
            reviews=self.reviews,
            aliases=self.aliases,
        )


class ScoringSettings(PolicySettings):
    """How traces are decided."""

    submitted_thresholds: bool = False
    cap_step_term: bool = False

    @property
    def reviews_any(self) -> bool:
        """Whether any trace can go to review."""
        return self.review is not None or bool(self.reviews)

    @property
    def domains(self) -> frozenset[str]:
        """Those that settings name: with a profile or a bound of their own, or as an alias."""
        return frozenset({*PROFILES, *self.profiles, *self.thresholds, *self.reviews, *self.aliases})

    def policy(self) -> Policy:
        """The policy that traces are decided by."""
        return replace(self._policy(), obeys_submissions=self.submitted_thresholds, cap_step_term=self.cap_step_term)


class ShadowSettings(PolicySettings):
    """A second policy, by which all is decided once more to see what it would change."""

    enabled: bool = False
    via: Literal["queue", "none"] = "none"

    @property
    def is_published(self) -> bool:
        """Whether what the shadow decides goes anywhere."""
        return self.enabled and self.via == "queue"

    def policy(self) -> Policy | None:
        """The shadow's policy; None if there is no shadow."""
        # It is given decisions, which say what a submission has asked for only if that was obeyed: then it obeys too.
        return replace(self._policy(), obeys_submissions=True) if self.enabled else None


class NoveltySettings(Section):
    """The novelty log and its window."""

    max_elements: Count = 1_000
    ttl_s: Seconds = 86_400.0
    # With fewer than a worker has in hand, the first traces of a batch could lose their windows.
    slack_elements: Annotated[int, Field(ge=1_000)] = 10_000
    slack_s: Seconds = 3_600.0
    vector_dtype: VectorType = "float32"
    recipe: RecipeName = "trace"

    def window(self) -> Window:
        """The window that these settings describe."""
        return Window(self.max_elements, int(self.ttl_s * 1_000), self.slack_elements, int(self.slack_s * 1_000))


class EmbeddingSettings(Section):
    """The embedder."""

    embedder: Literal["auto", "openvino", "torch", "none"] = "auto"
    required: bool = False
    model: str = ""
    threads: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _required_means_one(self) -> Self:
        if self.required and self.embedder == "none":
            raise ValueError("required = true needs an embedder other than 'none'")
        return self


class LedgerSettings(Section):
    """The record of every trace, and the dead letters."""

    ttl_s: Seconds = 86_400.0
    resend_after_s: Seconds = 600.0
    max_resends: Annotated[int, Field(ge=0)] = 3
    max_dead_letters: Count = 100_000
    max_dead_letter_bytes: Count = 268_435_456

    @property
    def ttl_ms(self) -> int:
        """``ttl_s`` in milliseconds."""
        return int(self.ttl_s * 1_000)


class WorkerSettings(Section):
    """One worker process."""

    concurrency: Count = 96
    batch_size: Annotated[int, Field(ge=1, le=256)] = 32
    max_attempts: Count = 5
    patience_s: Seconds = 30.0
    decision_timeout_s: Seconds = 120.0
    grace_s: Seconds = 25.0
    obey_commands: bool = False


class HealthSettings(Section):
    """What `kp-scorer health` looks at."""

    directory: str = ""


class MetricsSettings(Section):
    """Where a worker's metrics are served."""

    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class LogSettings(Section):
    """Logs, which go to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
