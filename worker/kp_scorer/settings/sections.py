"""Every setting, with its type and default, and the rules that hold within a section and between sections."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    field_serializer,
    field_validator,
    model_validator,
)

from kp_scorer.decision import KINDS, CheckName, DecisionKind, Demand, Dimensions, Outcome
from kp_scorer.decoding import MOST, Count, Limits
from kp_scorer.files import read_text
from kp_scorer.gate import GateBounds, GatePolicy
from kp_scorer.novelty import Window
from kp_scorer.scoring import PROFILES, Policy, check_weights
from kp_scorer.settings.urls import BROKER_SCHEMES, REDIS_SCHEMES, ServerUrl, is_loopback, parse_url
from kp_scorer.trace import Domain, Fraction, PrivacyLevel

Seconds = Annotated[float, Field(ge=0.001, le=1e9)]
Timeout = Annotated[float, Field(ge=0.001, le=86_400)]
CountOrZero = Annotated[int, Field(ge=0, le=MOST)]

SLACK_S: Final = 3_600
SLACK_ELEMENTS: Final = 10_000
"""The log keeps entries for this much longer than ``novelty.ttl_s``, and this many more than ``novelty.max_elements``.

If these were fewer than a worker has in flight, the first traces of a batch could lose their windows.
"""

NO_VECTORS: Final = (
    'routing.gate: "coverage" compares vectors, and there is no embedder: set embedding.embedder to words, which needs no model'
)
PIN_NAME: Final = r"^[A-Za-z0-9_.-]{1,64}$"
PinName = Annotated[str, Field(pattern=PIN_NAME)]
RecipeName = Literal["trace", "asked_and_did"]
UnreadableAction = Literal["score", "unknown"]
Via = Literal["queue", "stream", "task"]
LoggedDecisions = Literal["all", "accepted", "none"]
CheckAction = Literal["off", "note", "review", "reject"]
_QUEUE_NAME: Final = r"^[A-Za-z0-9_.:-]{1,200}$"
QueueName = Annotated[str, Field(pattern=_QUEUE_NAME)]

_LARGEST_SECRET_BYTES: Final = 65_536
_DECISION_BYTES: Final = 2_500  # The approximate size of a decision without its trace.
_DEMANDS: Final[dict[str, Demand | None]] = {"note": None, "review": "review", "reject": "rejected"}


class Section(BaseModel):
    """A section of the settings. It is frozen and refuses unknown names; errors do not quote values, which may be secrets."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)


class _ServerSection(Section):
    schemes: ClassVar[Sequence[str]]
    url: Annotated[str, Field(repr=False)] = ""
    _file: str = PrivateAttr("")  # The file that the URL was read from; empty if it had none of its own.

    @field_validator("url")
    @classmethod
    def _can_be_parsed(cls, url: str) -> str:
        if url:
            parse_url(url, cls.schemes)
        return url

    def server(self) -> ServerUrl:
        """Return the parsed URL, which must not be empty."""
        return parse_url(self.url, self.schemes)

    def from_file(self, file: str) -> Self:
        """Return a copy that knows the file that its URL was read from."""
        copy = self.model_copy()
        copy._file = file  # noqa: SLF001  # a copy of this one
        return copy

    def at(self, other: "_ServerSection") -> Self:
        """Return a copy with the URL of another section, and the file of that URL."""
        return self.model_copy(update={"url": other.url}).from_file(other._file)  # noqa: SLF001  # of this class

    @property
    def is_renewed(self) -> bool:
        """True if :meth:`server_now` may return another password than :meth:`server`."""
        return bool(self._file and self.server().password)

    def server_now(self) -> ServerUrl:
        """Return the parsed URL as its file has it now, or as it was read at the start if the file cannot be used."""
        with suppress(OSError, ValueError):
            if self._file and (renewed := parse_url(read_secret(self._file), self.schemes)).password:
                return renewed
        return self.server()


def read_secret(file: str) -> str:
    """Return the content of a file without its line ending."""
    return read_text(file, _LARGEST_SECRET_BYTES).removesuffix("\n").removesuffix("\r")


class BrokerSettings(_ServerSection):
    """The broker that traces come from and decisions go to."""

    schemes = BROKER_SCHEMES
    timeout_s: Timeout = 5.0
    visibility_timeout_s: Annotated[int, Field(ge=3, le=1_000_000_000)] = 60
    hold_s: ClassVar[float] = 600.0
    """On RabbitMQ a message that has been in flight for this long goes to the end of its queue.

    RabbitMQ would take it away after its consumer_timeout of 30 minutes, and count a delivery.
    """

    @property
    def is_redis(self) -> bool:
        """True if the queues are in Redis; otherwise the broker speaks AMQP."""
        return self.url.startswith("redis")


class RedisSettings(_ServerSection):
    """Where the novelty log and the ledger live."""

    schemes = REDIS_SCHEMES
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "kp"


class TraceQueue(Section):
    """The share of a queue of traces in what workers take, and the most traces that may wait there."""

    weight: Annotated[int, Field(ge=1, le=100)] = 1
    limit: CountOrZero = 0
    """0 sets no limit."""


def _as_table(traces: object) -> object:
    """Return the table that a single name stands for."""
    if not isinstance(traces, str):
        return traces
    if not re.match(_QUEUE_NAME, traces):
        raise ValueError("expected a name of 1 to 200 letters, digits and _.:-, or a table of queues by name")
    return {traces: TraceQueue()}


def intake_name(queue: str) -> str:
    """Return the name of the queue beside a queue of traces on RabbitMQ, for producers that declare the queue they send to."""
    return f"{queue}.intake"


def dead_name(queue: str) -> str:
    """Return the name of the queue beside a queue of traces to which RabbitMQ moves messages that expire."""
    return f"{queue}.dead"


class QueueSettings(Section):
    """The names of the queues, and their limits."""

    traces: Annotated[dict[QueueName, TraceQueue], BeforeValidator(_as_table), Field(min_length=1, max_length=100)] = Field(
        default_factory=lambda: {"traces": TraceQueue()}
    )
    accepted: QueueName = "decisions.accepted"
    review: QueueName = "decisions.review"
    rejected: QueueName = "decisions.rejected"
    revised: QueueName = "decisions.revised"
    message_bytes: Count = 1_048_576
    results_limit: Count = 100_000

    @model_validator(mode="after")
    def _queues_of_different_kinds_differ(self) -> Self:
        beside = [name for queue in self.traces for name in (intake_name(queue), dead_name(queue))]
        if clashes := {*beside} & {*self.traces}:
            raise ValueError(f"traces: expected names that no queue beside another has, got {', '.join(sorted(clashes))}")
        # Workers consume every message on a queue of traces as a submission.
        if {*self.traces, *beside} & set(map(self.name, KINDS)):
            raise ValueError(f"the queues of decisions need other names than {', '.join([*self.traces, *beside])}")
        return self

    @field_serializer("traces")
    def _as_configured(self, traces: dict[str, TraceQueue]) -> Any:
        (name, queue), *others = traces.items()
        return name if not others and queue == TraceQueue() else {each: traces[each].model_dump() for each in traces}

    @property
    def first(self) -> str:
        """The queue of traces for those who name none."""
        return next(iter(self.traces))

    def name(self, kind: DecisionKind) -> str:
        """Return the name of the queue, or the stream, of decisions of this kind."""
        return {"accepted": self.accepted, "review": self.review, "rejected": self.rejected, "revised": self.revised}[kind]


class ResultsSettings(Section):
    """The way in which decisions are published, and which of them are."""

    via: Via = "queue"
    publish: tuple[DecisionKind, ...] = KINDS
    task: Annotated[str, Field(pattern=r"^[!-~]{0,255}$")] = ""
    nearest: bool = True
    with_trace: bool = False

    @model_validator(mode="after")
    def _a_task_has_a_name(self) -> Self:
        if self.via == "task" and not self.task:
            raise ValueError("task: expected the name of the task to call where via is 'task'")
        return self


class ReviewSettings(Section):
    """The sample of decisions that goes to review beside those that :class:`ScoringSettings` send there."""

    sample: Fraction = 0.0


class ScoringSettings(Policy):
    """The policy by which traces are scored: thresholds, weights and aliases."""

    profiles: dict[Domain, Annotated[Dimensions, AfterValidator(check_weights)]] = Field(default_factory=lambda: dict(PROFILES))

    @field_validator("profiles")
    @classmethod
    def _added_to_the_built_in_ones(cls, profiles: dict[str, Dimensions]) -> dict[str, Dimensions]:
        return {**PROFILES, **profiles}

    @model_validator(mode="after")
    def _every_entry_has_an_effect(self) -> Self:
        clashes = list(self.reviews_above())
        own = {*self.profiles, *self.thresholds, *self.reviews, *self.min_novelties}
        for alias, domain in self.aliases.items():
            if alias in own:
                clashes.append(f"aliases.{alias}: expected a name without a profile or bounds of its own")
            if domain not in own:
                # Nor may it be an alias: aliases are resolved by a single look-up.
                clashes.append(f"aliases.{alias}: expected a domain with a profile or bounds, got {domain!r}")
        if clashes:
            raise ValueError("; ".join(clashes))
        return self

    def reviews_above(self) -> Iterator[str]:
        """Describe each review that is above its threshold."""
        for domain in dict.fromkeys(("", *self.thresholds, *self.reviews)):
            threshold, review = self.thresholds.get(domain, self.threshold), self.reviews.get(domain, self.review)
            if review is not None and review > threshold:
                where = f"reviews.{domain}" if domain else "review"
                yield f"{where}: expected at most the threshold of {threshold:g}, got {review:g}"


class PinSettings(Section):
    """The largest similarity to a pinned set that has no effect, and the outcome of traces beyond it."""

    similarity: Annotated[float, Field(ge=0, lt=1)]
    beyond: Literal["reject", "review", "note"]


class RoutingSettings(Section):
    """What decides whether a trace is accepted: its score, or what it adds to what is kept."""

    gate: Literal["score", "coverage"] = "score"
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    bar: Annotated[float, Field(gt=0)] | None = None
    requires: Literal["success"] | Fraction = "success"

    @property
    def policy(self) -> GatePolicy:
        """What the gate of coverage lets through."""
        return GatePolicy(self.share, self.bar, self.requires)


class GateSettings(Section):
    """How many kept traces the gate of coverage compares with, and for how long."""

    kept_elements: Annotated[int, Field(ge=1_000, le=MOST)] = 10_000  # Far more than are kept while a worker decides a batch.
    kept_ttl_s: Seconds = 4_838_400.0

    @property
    def bounds(self) -> GateBounds:
        """The bounds of what is kept."""
        return GateBounds(self.kept_elements, int(self.kept_ttl_s * 1_000))


class NoveltySettings(Section):
    """The novelty log and its window."""

    max_elements: Count = 1_000
    ttl_s: Seconds = 86_400.0
    recipe: RecipeName = "trace"
    against: Literal["all", "succeeded"] = "all"
    unreadable: UnreadableAction = "score"
    pinned: dict[PinName, PinSettings] = Field(default_factory=dict)
    succeeded_confidence: ClassVar[float] = 0.5
    """The confidence from which a success counts as one if ``against`` is "succeeded"."""

    @property
    def limits(self) -> dict[str, tuple[float, Outcome | None]]:
        """The largest similarity to each pinned set, and the outcome that a trace beyond it gets at least."""
        return {name: (each.similarity, _DEMANDS[each.beyond]) for name, each in self.pinned.items()}

    def window(self) -> Window:
        """Return the window that these settings describe."""
        least = self.succeeded_confidence if self.against == "succeeded" else None
        return Window(self.max_elements, int(self.ttl_s * 1_000), SLACK_ELEMENTS, SLACK_S * 1_000, least)


class EmbeddingSettings(Section):
    """The embedder."""

    embedder: Literal["auto", "openvino", "torch", "words", "none"] = "auto"
    model: str = ""
    threads: Annotated[int, Field(ge=0, le=1_024)] = 0


class ChecksSettings(Section):
    """The checks that each trace goes through, and the outcomes that they may demand."""

    secrets: CheckAction = "off"
    secrets_by_privacy: dict[PrivacyLevel, CheckAction] = Field(default_factory=dict)
    own: dict[CheckName, CheckAction] = Field(default_factory=dict)
    timeout_s: ClassVar[float] = 10.0
    """A check that takes longer than this for a trace has failed. Those that we know take milliseconds."""
    start_s: ClassVar[float] = 30.0
    """Checks may take this long to load. The check for secrets takes a second, or ten where its rules are not compiled yet."""

    def allowed(self, level: PrivacyLevel) -> dict[str, Demand | None]:
        """Return the checks that run on a trace of this privacy level, and the strictest outcome that each may demand."""
        actions = {**self.own, "secrets": self.secrets_by_privacy.get(level, self.secrets)}
        return {name: _DEMANDS[action] for name, action in actions.items() if action != "off"}

    @property
    def names(self) -> tuple[str, ...]:
        """The checks that run on any trace."""
        return tuple(dict.fromkeys(name for level in get_args(PrivacyLevel) for name in self.allowed(level)))


class LedgerSettings(Section):
    """The record of every trace, and the dead letters."""

    ttl_s: Seconds = 86_400.0
    resend_after_s: Seconds = 600.0
    max_resends: ClassVar[int] = 3
    """A trace that was sent again this many times without a decision becomes a dead letter."""
    max_dead_letters: ClassVar[int] = 50_000
    max_dead_letter_bytes: ClassVar[int] = 2**27
    """The ledger keeps this many dead letters and bytes of them, and at most a quarter of Redis' maxmemory."""

    @property
    def ttl_ms(self) -> int:
        """``ttl_s`` in milliseconds."""
        return int(self.ttl_s * 1_000)


class WorkerSettings(Section):
    """One worker process."""

    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 96
    max_attempts: Count = 5
    grace_s: Seconds = 25.0
    remote_control: bool = False
    patience_s: ClassVar[float] = 60.0
    """A starting worker waits this long for Redis, and for the broker. Then it ends, and its supervisor starts it again."""
    stalled_after_s: ClassVar[float] = 120.0
    """A worker that makes no progress for this long is stalled; see :attr:`Settings.decision_timeout_s`."""
    in_flight_bytes: ClassVar[int] = 320 * 2**20
    """A worker with this many bytes of messages in flight receives no more.

    RabbitMQ counts messages only, so there a worker has no more in flight than messages of the largest size would fit.
    """

    @property
    def batch_size(self) -> int:
        """The most traces looked up together: two such batches are being decided while a third is published."""
        return max(1, min(self.concurrency // 3, 256))


class MetricsSettings(Section):
    """The address where a worker serves its metrics and answers probes."""

    port: Annotated[int, Field(ge=0, le=65_534)] = 9464
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"

    def of_serve(self) -> Self:
        """Return the address where ``kp-scorer serve`` does the same: the next port."""
        return self.model_copy(update={"port": self.port + 1}) if self.port else self


class ServeSettings(Section):
    """The server of HTTP and gRPC: its address, its tokens, fields that spans do not carry, limits on spans, and kept runs."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 4318
    grpc_port: Annotated[int, Field(ge=0, le=65_535)] = 4317
    tokens: str = ""
    certificate: str = ""
    key: str = ""
    behind_proxy: bool = False
    confidence: Fraction | None = None
    success: bool | None = None
    quiet_s: Seconds = 10.0
    outcome_wait_s: Annotated[float, Field(ge=0, le=604_800)] = 0.0
    total_bytes: Count = 268_435_456
    kept: str = ""
    open_s: ClassVar[float] = 900.0
    """The time that a run waits for spans that it lacks."""
    body_bytes: ClassVar[int] = 2**23
    """The most bytes of a request, unpacked."""
    run_spans: ClassVar[int] = 5_000
    run_bytes: ClassVar[int] = 2**24
    """The most spans of a run, and the most bytes of them. A larger run is dead."""
    runs: ClassVar[int] = 10_000
    """The most runs that are collected at once. Beyond it, as beyond ``total_bytes``, requests are answered with 429."""

    @model_validator(mode="after")
    def _others_need_a_token_and_tls(self) -> Self:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate, key: expected both or neither")
        if is_loopback(self.host):
            return self
        if not self.certificate and not self.behind_proxy:
            raise ValueError("host: beyond this machine, expected certificate and key, or behind_proxy where a proxy ends TLS")
        if not self.tokens:
            raise ValueError("tokens: expected a file of tokens, as host can be reached from other machines")
        return self


class LogSettings(Section):
    """Logs, which go to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    decisions: LoggedDecisions = "all"


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
        """Return a digest of the settings that all workers of a fleet have alike, by those that are not the default."""
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
        """The time without progress after which a worker is stalled. Each check may need a new process."""
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

        It does if only rejected decisions or revisions go there. A queue of another app's tasks never does: the app may have
        other tasks on it.
        """
        return self.results.via != "task" and name not in (self.queues.accepted, self.queues.review)

    @property
    def kinds(self) -> tuple[DecisionKind, ...]:
        """The kinds that are published and that decisions made under these settings may be of.

        As calls of a task, revisions go where others of their outcome go: another app declares its queues.
        """
        # A check that may reject demands review if it fails.
        demands = (demand for level in get_args(PrivacyLevel) for demand in self.checks.allowed(level).values())
        pinned = (each.beyond for each in self.novelty.pinned.values())
        is_demanded = self.review.sample or any(demands) or "review" in pinned
        is_reviewed = self.scoring.review is not None or self.scoring.reviews or is_demanded
        is_possible = {"accepted": True, "review": is_reviewed, "rejected": True, "revised": self.results.via != "task"}
        return tuple(each for each in self.results.publish if is_possible[each])
