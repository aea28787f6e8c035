"""Every section of the settings but those of servers and queues, with its defaults and the rules that hold within it."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, Literal, Self, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from kp_scorer.decision import CheckName, Demand, Dimensions, Outcome
from kp_scorer.gate import GateBounds, GatePolicy
from kp_scorer.limits import LARGEST_NUMBER, Count
from kp_scorer.novelty import Window
from kp_scorer.scoring import PROFILES, Policy, check_weights
from kp_scorer.settings.section import Seconds, Section
from kp_scorer.settings.urls import is_loopback
from kp_scorer.trace import Domain, Fraction, PrivacyLevel

SLACK_S: Final = 3_600
SLACK_ELEMENTS: Final = 10_000
"""The log keeps entries for this much longer than ``novelty.ttl_s``, and this many more than ``novelty.max_elements``.

If these were fewer than a worker has in flight, the first traces of a batch could lose their windows.
"""

PIN_NAME: Final = r"^[A-Za-z0-9_.-]{1,64}$"
PinName = Annotated[str, Field(pattern=PIN_NAME)]
RecipeName = Literal["trace", "asked_and_did"]
UnreadableAction = Literal["score", "unknown"]
LoggedDecisions = Literal["all", "accepted", "none"]
CheckAction = Literal["off", "note", "review", "reject"]

_DEMANDS: Final[dict[str, Demand | None]] = {"note": None, "review": "review", "reject": "rejected"}


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
        """Yield an error for each domain whose bound of review is above its threshold."""
        for domain in dict.fromkeys(("", *self.thresholds, *self.reviews)):
            threshold, review = self.thresholds.get(domain, self.threshold), self.reviews.get(domain, self.review)
            if review is not None and review > threshold:
                where = f"reviews.{domain}" if domain else "review"
                yield f"{where}: expected at most the threshold of {threshold:g}, got {review:g}"


class PinSettings(Section):
    """The largest similarity to a pinned set that is allowed, and the consequence for a trace beyond it."""

    similarity: Annotated[float, Field(ge=0, lt=1)]
    beyond: Literal["reject", "review", "note"]


class RoutingSettings(Section):
    """The gate that accepts traces: by their score, or by what they add to the kept traces."""

    gate: Literal["score", "coverage"] = "score"
    share: Annotated[float, Field(ge=0.005, lt=1)] = 0.1  # The least share is one of the 200 runs that set the bar.
    bar: Annotated[float, Field(gt=0)] | None = None
    requires: Literal["success"] | Fraction = "success"

    @property
    def policy(self) -> GatePolicy:
        """The policy of the coverage gate."""
        return GatePolicy(self.share, self.bar, self.requires)


class GateSettings(Section):
    """The number and lifetime of the kept traces with which the coverage gate compares."""

    # The minimum is far more traces than are kept while a worker decides a batch.
    kept_elements: Annotated[int, Field(ge=1_000, le=LARGEST_NUMBER)] = 10_000
    kept_ttl_s: Seconds = 4_838_400.0

    @property
    def bounds(self) -> GateBounds:
        """The bounds on kept traces, as the gate takes them."""
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
    """The choice of the embedder, its model and its threads."""

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
    """The records of traces, their lifetime, and the dead letters."""

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
    """The load that a worker process takes on, and its patience."""

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

    RabbitMQ limits only the number of messages, so there a worker gets as many as would fit if all had the largest size.
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
    keep_spans_s: Annotated[float, Field(ge=0, le=604_800)] = 0.0
    total_bytes: Count = 268_435_456
    kept: str = ""
    open_s: ClassVar[float] = 900.0
    """A run waits this long for spans that it lacks."""
    body_bytes: ClassVar[int] = 2**23
    """A request has at most this many bytes, unpacked."""
    run_spans: ClassVar[int] = 5_000
    run_bytes: ClassVar[int] = 2**24
    """The most spans of a run, and the most bytes of its spans. A larger run becomes a dead letter."""
    runs: ClassVar[int] = 10_000
    """The most runs that are collected at once. Beyond it, as beyond ``total_bytes``, requests are answered with 429."""

    @model_validator(mode="after")
    def _others_need_a_token_and_tls(self) -> Self:
        if bool(self.certificate) != bool(self.key):
            raise ValueError("certificate, key: expected both or neither")
        if is_loopback(self.host):
            return self
        if not self.certificate and not self.behind_proxy:
            raise ValueError("host: other machines can reach it: set certificate and key, or behind_proxy if a proxy ends TLS")
        if not self.tokens:
            raise ValueError("tokens: expected a file of tokens, as host can be reached from other machines")
        return self


class LogSettings(Section):
    """The level of the log, which goes to stderr, and the decisions that it contains."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    decisions: LoggedDecisions = "all"
