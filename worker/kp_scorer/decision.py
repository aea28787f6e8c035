"""The ``Decision`` message: the outcome of a trace, and everything that led to it."""

from datetime import datetime
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BaseModel, Field

from kp_scorer.trace import Fraction, PrivacyLevel, Visibility

Outcome = Literal["accepted", "review", "rejected"]  # From the mildest to the strictest.
DecisionKind = Literal["accepted", "review", "rejected", "revised"]
"""The kind under which a decision is published: its outcome if it is the first decision on the trace, else revised."""
KINDS: Final[tuple[DecisionKind, ...]] = get_args(DecisionKind)
ThresholdSource = Literal["default", "domain", "submission"]
NoveltySource = Literal["embedding", "empty_cache", "no_embedder", "unreadable"]
Override = Literal["single_thought", "recovered_from_errors", "single_tool"]
GuardName = Literal["max_confidence", "min_novelty", "copies"]
Demand = Literal["review", "rejected"]  # The outcomes that a check may demand, whatever the score.
CheckFailure = Literal["timeout", "error"]
CheckName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]
"""The pattern is so narrow that no text of a trace gets through as a name."""

MOST_FINDINGS: Final = 32
FAILURE_FACTOR: Final = 0.3  # The part of its confidence that counts for a failure; a larger outcome dimension is a success's.
_UNREADABLE: Final = 0.3  # Texts with a larger share of unknown tokens look alike: each of these stands for a whole word.

_OR_LEFT_OUT: Final = Field(exclude_if=lambda value: value is None or value == ())  # The message omits an empty value.


def _checked_time(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("expected a time with its zone")
    return text


class _Part(BaseModel, frozen=True, extra="ignore", allow_inf_nan=False):
    """A frozen part of a decision. It ignores fields that later versions add, so that old consumers keep working."""


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
    """A guard that the operator sets against traces that were made to score high."""

    name: GuardName
    bound: Fraction | None = None
    """The largest confidence that counts, or the least novelty; None for ``copies``."""
    fired: bool
    """True if the guard lowered the confidence or rejected the trace."""

    @property
    def rejects(self) -> bool:
        """True if the guard rejects the trace, whatever its score."""
        return self.fired and self.name != "max_confidence"


class Findings(_Part, extra="forbid"):
    """The findings of a check: up to 32 counts and 32 numbers, each under a plain name of up to 64 characters, and no text."""

    kinds: Annotated[dict[CheckName, Annotated[int, Field(ge=0, le=10**9)]], Field(max_length=MOST_FINDINGS)] = {}
    """The number of findings of each kind."""
    numbers: Annotated[dict[CheckName, float], Field(max_length=MOST_FINDINGS)] = {}
    """Other measurements of the check."""
    outcome: Demand | None = None
    """The outcome that the check demands, whatever the score. The strictest of all demands wins; settings may limit each."""


class CheckResult(Findings, extra="ignore"):
    """The findings of one version of a check, and the outcome that the settings let it demand."""

    name: CheckName
    version: Annotated[str, Field(pattern=r"^[!-~]{1,64}$")]
    failure: CheckFailure | None = None
    """Set if the check failed. A check that may demand an outcome then demands review, because the trace is unchecked."""


class Nearest(_Part):
    """The most similar earlier trace within the window, and the cosine similarity to it (-1..1)."""

    trace_id: str
    similarity: Annotated[float, Field(ge=-1, le=1)]


class Novelty(_Part):
    """The source of the novelty, and the comparison that it results from."""

    source: NoveltySource
    nearest: Nearest | None = None
    """None if the window is empty, there is no embedder, or ``results.nearest`` is off."""
    duplicate_of: str | None = None
    """Id of the earliest trace in the window with the same content; None if there is none, or if ``nearest`` is None."""
    embedder: str | None = None
    """Name of the model that embedded the trace."""
    embedded_tokens: int | None = None
    """The number of tokens of the text that were embedded; None if the embedder counts none."""
    unknown_tokens: int | None = None
    """The number of embedded tokens that stand for words unknown to the model, all of them the same token."""
    text_tokens: int | None = None
    """The number of tokens in the text; None if it has more than were embedded, as the rest is not tokenized."""
    space: str | None = None
    """Fingerprint of what makes vectors comparable; the name of the novelty log begins with it."""
    entry: Annotated[str, Field(pattern=r"^[0-9]{1,15}-[0-9]{1,15}$")] | None = None
    """Place in the novelty log: ``<Redis time in ms>-<number, from 1>``."""

    @property
    def is_unreadable(self) -> bool:
        """True if the model knows so few words of the text that it looks like any other such text."""
        return (self.unknown_tokens or 0) > _UNREADABLE * (self.embedded_tokens or 0)


class GateResult(_Part):
    """The amount that the trace adds to the kept traces of its domain, and the bar that it was measured against."""

    adds: Annotated[float, Field(ge=0)]
    """The amount by which the trace would raise its own cover and those of the last runs of its domain, in whole runs."""
    bar: Annotated[float, Field(ge=0)]
    """The amount that the trace has to add."""
    share: Annotated[float | None, Field(gt=0, lt=1)] = None
    """The share of its domain's traces that the bar follows; None if the bar is fixed."""
    eligible: bool
    """True if the trace meets the requirement of ``routing.requires``."""
    nearest: Nearest | None = None
    """The kept trace that covers this one best; None if none does, or ``results.nearest`` is off."""
    as_of: Annotated[str, Field(pattern=r"^[0-9]{1,15}-[0-9]{1,15}$")]
    """The newest earlier decision that this one rests on, as the id of its fact; 0-0 if there was none."""

    @property
    def accepts(self) -> bool:
        """True if the gate accepts the trace."""
        return self.eligible and self.adds >= self.bar


class Pinned(_Part):
    """The entry of a pinned set that is nearest to the trace."""

    name: str
    version: str
    """Digest of the set's content when the trace was compared with it."""
    nearest: str | None
    """Id of the trace, or the line number of the text; None if ``results.nearest`` is off."""
    similarity: Annotated[float, Field(ge=-1, le=1)]
    limit: Fraction
    """A larger similarity demands an outcome."""
    outcome: Outcome | None = None
    """The outcome that the set demands; None if the similarity is within the limit."""


class Received(_Part):
    """The delivery of the submission to the worker that decided it."""

    worker: str
    """The worker's name, as ``kp-scorer stats`` shows it."""
    queued_ms: Annotated[int | None, Field(ge=0), _OR_LEFT_OUT] = None
    """The time from sending to this delivery; omitted if neither the producer nor RabbitMQ says when the message was sent."""
    deliveries: Annotated[int, Field(ge=1)]
    """The number of deliveries, this one included; more than one if a worker ended or requeued the message."""


class Stated(_Part):
    """The outcome that the submission states, which a late outcome replaces, and the recoveries, which stay the same."""

    success: bool
    confidence: Fraction
    recoveries: Annotated[int, Field(ge=0)]
    """The number of steps that recover from an error."""


class RevisedBy(_Part):
    """The late outcome by which a trace was decided again."""

    id: str
    success: bool
    confidence: Fraction | None = None
    """None if the confidence that the submission states still holds."""
    reason: str | None = None


class Superseded(_Part):
    """The decision that a revision supersedes."""

    revision: int
    outcome: Outcome
    score: Fraction
    decided_at: str


class Timings(_Part):
    """The milliseconds that each step took for all traces that went through it together."""

    held_ms: Annotated[float | None, _OR_LEFT_OUT] = None
    """The time from the delivery to the last look-up: the wait for other traces or for a lost connection. Omitted offline."""
    look_up_ms: float
    wait_ms: float = 0.0
    """The time from the look-up until the engine began to embed the text."""
    embed_ms: float
    place_ms: float
    batch_size: int
    """The number of traces that were placed and committed together."""


class Decision(_Part):
    """The decision on a trace, and the reasons. It is made once for a trace id, and a redelivery returns it unchanged.

    Each late outcome leads to one revision, which changes only the fields that follow from the outcome.
    """

    schema_version: Literal[1] = 1
    """The version of the format, which stays the same while only optional fields are added; a reader refuses any other."""
    trace_id: str
    revision: Annotated[int, Field(ge=1, exclude_if=lambda number: number == 1)] = 1
    """Omitted from the first decision."""
    supersedes: Annotated[Superseded | None, _OR_LEFT_OUT] = None
    """This and ``revised_by`` are set only in revisions."""
    revised_by: Annotated[RevisedBy | None, _OR_LEFT_OUT] = None
    domain: str
    """The domain as it was submitted."""
    agent_id: str | None = None
    """The agent that the trace names; None if its name is longer than 200 characters. The same holds for ``framework``."""
    framework: str | None = None
    visibility: Visibility | None = None
    """This and ``privacy_level`` are those of the trace."""
    privacy_level: PrivacyLevel | None = None
    taken_for: str | None = None
    """The domain whose profile and bounds apply instead, if the operator has made this domain an alias for it."""
    outcome: Outcome
    score: Fraction
    threshold: Fraction
    threshold_source: ThresholdSource
    """The origin of the threshold: all domains, the trace's domain, or the submission itself."""
    review: Fraction | None = None
    """From this score on, a trace that is not accepted goes to review; None if none does."""
    stated: Annotated[Stated | None, _OR_LEFT_OUT] = None
    """None if an earlier version decided; then no late outcome can be judged."""
    dimensions: Dimensions
    profile: str
    weights: Dimensions
    """The profile's weight for each dimension; they sum to 1."""
    composite: Fraction
    """The weighted sum before any override."""
    overrides: tuple[FiredOverride, ...] = ()
    guards: Annotated[tuple[Guard, ...], _OR_LEFT_OUT] = ()
    """The guards that apply, whether they fired or not."""
    checks: Annotated[tuple[CheckResult, ...], _OR_LEFT_OUT] = ()
    """The checks that ran on the trace."""
    gate: Annotated[GateResult | None, _OR_LEFT_OUT] = None
    """Set if ``routing.gate`` is "coverage": then it decides in place of the threshold."""
    sampled: Annotated[float | None, Field(gt=0, le=1), _OR_LEFT_OUT] = None
    """The probability with which a trace is sampled for review; None if this one was not."""
    novelty: Novelty
    pinned: Annotated[tuple[Pinned, ...], _OR_LEFT_OUT] = ()
    """The nearest entry of each pinned set that applies."""
    received: Annotated[Received | None, _OR_LEFT_OUT] = None
    """None if the decision was made offline."""
    timings: Timings
    decided_at: Annotated[str, AfterValidator(_checked_time)]
    """ISO 8601, UTC, by the worker's clock. The order of decisions is that of ``novelty.entry``."""
    trace: Annotated[dict[str, Any] | None, _OR_LEFT_OUT] = None
    """With ``results.with_trace``, the trace as it was submitted, with the score as its ``metadata.quality_score``.

    Only messages carry it, and not if the trace exceeds the limits of the worker that publishes.
    """

    @property
    def succeeded(self) -> bool:
        """True if the trace succeeded by its late outcome, or else by its submission, or else by its outcome dimension."""
        outcome = self.revised_by or self.stated
        return outcome.success if outcome else self.dimensions.outcome_confidence > FAILURE_FACTOR

    @property
    def is_guarded(self) -> bool:
        """True if a guard, a check or a pinned set keeps the trace from being accepted, whatever its score."""
        return any(guard.rejects for guard in self.guards) or any(self.demanded)

    @property
    def demanded(self) -> tuple[Outcome | None, ...]:
        """The outcome that each check and pinned set demands, or None."""
        return (*(check.outcome for check in self.checks), *(each.outcome for each in self.pinned))

    def bound(self, name: GuardName, default: float = 1.0) -> float:
        """Return the bound, 0..1, of the guard of this name; the default if no such guard applied."""
        return next((guard.bound for guard in self.guards if guard.name == name and guard.bound is not None), default)

    @property
    def mark(self) -> str:
        """The value that copies of this decision share. A later decision on the trace has another mark."""
        return self.decided_at
