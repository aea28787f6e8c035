"""The ``Decision`` message: the outcome of a trace, with every part that led to it."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, Field

from kp_scorer.trace import Fraction, PrivacyLevel, Visibility

Outcome = Literal["accepted", "review", "rejected"]
"""From the mildest to the strictest."""
ThresholdSource = Literal["default", "domain", "submission"]
NoveltySource = Literal["embedding", "empty_cache", "no_embedder", "unreadable"]
Override = Literal["single_thought", "recovered_from_errors", "single_tool"]
GuardName = Literal["max_confidence", "min_novelty", "copies"]
Demand = Literal["review", "rejected"]
"""What a check may demand, whatever the score."""
CheckFailure = Literal["timeout", "error"]
CheckName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
"""Too plain for text of a trace."""

MOST_FINDINGS: Final = 32
_UNREADABLE: Final = 0.3
"""The share of unknown tokens from which on texts look alike. Each stands for a whole word, so by characters it is far more."""

_OR_LEFT_OUT: Final = Field(exclude_if=lambda value: value is None or value == ())  # Of the message, where there is none.


def _checked_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("expected a time with its zone")
    return text


class _Part(BaseModel, frozen=True, extra="ignore", allow_inf_nan=False):
    """Frozen; fields that a later version adds are ignored, so old consumers keep working."""


class Dimensions(_Part):
    """The four dimensions. ``complexity``, ``novelty``, ``tool_diversity`` and ``outcome_confidence`` are all in 0..1."""

    complexity: Fraction
    novelty: Fraction
    tool_diversity: Fraction
    outcome_confidence: Fraction


class FiredOverride(_Part):
    """A rule that changed the score, and the score after it."""

    name: Override
    score: Fraction


class Guard(_Part):
    """A guard that the operator sets against traces made for their score."""

    name: GuardName
    bound: Fraction | None = None
    """The largest confidence that counts, or the least novelty; ``copies`` has none."""
    fired: bool
    """Whether it lowered the confidence or rejected the trace."""

    @property
    def rejects(self) -> bool:
        """Whether the trace is rejected because of it, whatever its score."""
        return self.fired and self.name != "max_confidence"


class Findings(_Part, extra="forbid"):
    """What a check finds in a trace: counts and numbers by plain names of at most 64 characters, 32 of each, and no text."""

    kinds: Annotated[dict[CheckName, Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=MOST_FINDINGS)] = {}
    """How many of each kind there are."""
    numbers: Annotated[dict[CheckName, float], Field(max_length=MOST_FINDINGS)] = {}
    """Whatever else it measures."""
    outcome: Demand | None = None
    """The outcome that it demands, whatever the score; the strictest wins, and settings may allow less."""


class CheckResult(Findings, extra="ignore"):
    """What a check of this ``version`` found, with the outcome that it demands by the settings."""

    name: CheckName
    version: Annotated[str, Field(pattern=r"^[!-~]{1,64}$")]
    failure: CheckFailure | None = None
    """Why it found nothing; then a check that may demand an outcome demands review, as nobody has seen what is in the trace."""


class Nearest(_Part):
    """The most similar earlier trace within the window, and the cosine similarity to it (-1..1)."""

    trace_id: str
    similarity: Annotated[float, Field(ge=-1, le=1)]


class Novelty(_Part):
    """Where the novelty came from."""

    source: NoveltySource
    nearest: Nearest | None = None
    """None where the window has none to compare with, without an embedder, and where ``results.nearest`` is off."""
    duplicate_of: str | None = None
    """Id of the earliest trace in the window with the same content; None as for the nearest."""
    embedder: str | None = None
    """Name of the model that embedded the trace."""
    embedded_tokens: int | None = None
    """How many tokens of its text were embedded; None where the embedder counts none."""
    unknown_tokens: int | None = None
    """How many of these stand for words that the model does not know, all by the same token."""
    text_tokens: int | None = None
    """How many tokens its text has; None where those are more than were embedded, as the rest is not tokenised."""
    space: str | None = None
    """Fingerprint of what makes vectors comparable; the name of the novelty log begins with it."""
    entry: Annotated[str, Field(pattern=r"^[0-9]{1,15}-[0-9]{1,15}$")] | None = None
    """Place in the novelty log: ``<Redis time in ms>-<number, from 1>``."""

    @property
    def is_unreadable(self) -> bool:
        """Whether the model knows so few words of the text that it looks like any other of that kind."""
        return (self.unknown_tokens or 0) > _UNREADABLE * (self.embedded_tokens or 0)


class Pinned(_Part):
    """What a pinned set has nearest to the trace."""

    name: str
    version: str
    """Digest of the set, as it was then."""
    nearest: str | None
    """Id of the trace, or the number of the text's line; None where ``results.nearest`` is off."""
    similarity: Annotated[float, Field(ge=-1, le=1)]
    limit: Fraction
    """The largest similarity that demands nothing."""
    outcome: Outcome | None = None
    """The outcome that the trace gets at least, as it is more similar."""


class Received(_Part):
    """The delivery of the submission to the worker that decided it."""

    worker: str
    """Its name, as ``kp-scorer top`` shows it."""
    queued_ms: Annotated[int | None, Field(ge=0), _OR_LEFT_OUT] = None
    """From its sending to this delivery; left out where neither its producer nor RabbitMQ says when it was sent."""
    deliveries: Annotated[int, Field(ge=1)]
    """How often it was delivered, this time included; more than once if a worker ended or requeued it."""


class Timings(_Part):
    """Milliseconds of the steps that the trace was part of."""

    held_ms: Annotated[float | None, _OR_LEFT_OUT] = None
    """From the delivery until the last look-up began: while others were decided, or a service was away. Left out offline."""
    look_up_ms: float
    wait_ms: float = 0.0
    """From the look-up until the engine began to embed it; 0 in decisions of earlier versions."""
    embed_ms: float
    place_ms: float
    batch_size: int
    """How many traces were placed and committed together."""


class Decision(_Part):
    """Accept, have reviewed or reject, and why. Made once for a trace id; a redelivery returns it unchanged."""

    schema_version: Literal[1] = 1
    """Stays as long as versions only add fields that may be missing; readers of this one refuse any other."""
    trace_id: str
    domain: str
    """As it was submitted."""
    agent_id: str | None = None
    """As the trace has it, as the next three; None also where it has more than 200 characters."""
    framework: str | None = None
    visibility: Visibility | None = None
    """How the trace may be shared; None only in decisions of earlier versions. The same holds for ``privacy_level``."""
    privacy_level: PrivacyLevel | None = None
    taken_for: str | None = None
    """The domain whose profile and bounds apply instead, by one of the operator's aliases."""
    outcome: Outcome
    score: Fraction
    threshold: Fraction
    threshold_source: ThresholdSource
    """Whether the threshold is that of all domains, of the trace's domain, or the one that the submission asked for."""
    review: Fraction | None = None
    """The score from which a trace that is not accepted goes to review; none does without."""
    dimensions: Dimensions
    profile: str
    weights: Dimensions
    """The profile's weight for each dimension; they sum to 1."""
    composite: Fraction
    """The weighted sum before any override."""
    overrides: tuple[FiredOverride, ...] = ()
    guards: Annotated[tuple[Guard, ...], _OR_LEFT_OUT] = ()
    """Those that apply, whether they fired or not. Left out of the message if there are none."""
    checks: Annotated[tuple[CheckResult, ...], _OR_LEFT_OUT] = ()
    """Those that ran on the trace. Left out of the message if there are none."""
    sampled: Annotated[float | None, Field(gt=0, le=1), _OR_LEFT_OUT] = None
    """The probability by which the trace went to review as one of the sample; left out of the message if it did not."""
    novelty: Novelty
    pinned: Annotated[tuple[Pinned, ...], _OR_LEFT_OUT] = ()
    """By each pinned set that applies. Left out of the message if there are none."""
    received: Annotated[Received | None, _OR_LEFT_OUT] = None
    """Left out of decisions that were made offline, or by earlier versions."""
    timings: Timings
    decided_at: Annotated[str, AfterValidator(_checked_time)]
    """ISO 8601, UTC, by the worker's clock. The order of decisions is that of ``novelty.entry``."""
    trace: Annotated[dict[str, Any] | None, _OR_LEFT_OUT] = None
    """With ``results.with_trace``, the trace as it was submitted, its ``metadata.quality_score`` being the score.

    Only messages carry it, and not where the trace is over the limits of the worker that publishes.
    """

    @property
    def is_guarded(self) -> bool:
        """Whether a guard, a check or a pinned set keeps the trace from being accepted, whatever its score."""
        return any(guard.rejects for guard in self.guards) or any(self.demanded)

    @property
    def demanded(self) -> tuple[Outcome | None, ...]:
        """The outcome that each check and pinned set demands, if any."""
        return (*(check.outcome for check in self.checks), *(each.outcome for each in self.pinned))

    @property
    def mark(self) -> str:
        """What copies of this decision share, and no later one on the same trace has, made after this one was forgotten."""
        return self.decided_at
