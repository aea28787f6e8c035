"""The sections of the settings but for the policies: their names, types and defaults, and what must hold within each."""

from collections.abc import Callable
from itertools import combinations
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from kp_scorer.decision import Outcome
from kp_scorer.decoding import Count
from kp_scorer.novelty import Window
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


class OtelSettings(Section):
    """Spans of OpenTelemetry, which its own variables say where to export."""

    enabled: bool = False


class LogSettings(Section):
    """Logs, which go to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"
