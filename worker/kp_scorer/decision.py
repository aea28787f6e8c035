"""The ``Decision`` message: what the scorer says about a trace, with every part that led to it."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kp_scorer.trace import Fraction

SCHEMA_VERSION: Literal[1] = 1
"""Stays as long as versions only add fields that may be missing; readers of this one refuse any other."""

Outcome = Literal["accepted", "review", "rejected"]
ThresholdSource = Literal["default", "domain", "submission"]
NoveltySource = Literal["embedding", "empty_cache", "no_embedder"]
Override = Literal["single_thought", "recovered_from_errors", "single_tool"]


class _Part(BaseModel):
    """Frozen; fields that a later version adds are ignored, so old consumers keep working."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


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


class Nearest(_Part):
    """The most similar earlier trace within the window, and the cosine similarity to it (-1..1)."""

    trace_id: str
    similarity: Annotated[float, Field(ge=-1, le=1)]


class Novelty(_Part):
    """Where the novelty came from."""

    source: NoveltySource
    nearest: Nearest | None = None
    duplicate_of: str | None = None
    """Id of the earliest trace in the window with the same content."""
    embedder: str | None = None
    """Name of the model that embedded the trace."""
    space: str | None = None
    """Fingerprint of what makes vectors comparable; the name of the novelty log begins with it."""
    entry: str | None = None
    """Place in the novelty log: ``<Redis time in ms>-<number, from 1>``."""


class Timings(_Part):
    """Milliseconds that the trace's batch spent in each stage, and how many traces shared it."""

    look_up_ms: float
    embed_ms: float
    place_ms: float
    batch_size: int


class Decision(_Part):
    """Accept, have reviewed or reject, and why. Made once for a trace id; a redelivery returns it unchanged."""

    schema_version: Literal[1] = SCHEMA_VERSION
    trace_id: str
    domain: str
    """As it was submitted."""
    taken_for: str | None = None
    """The domain whose profile and bounds count in place of its own, by one of the operator's aliases."""
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
    novelty: Novelty
    timings: Timings
    decided_at: str
    """ISO 8601, UTC, by the worker's clock. The order of decisions is that of ``novelty.entry``."""

    @property
    def mark(self) -> str:
        """What tells copies of this decision from another one on the same trace, made after that was forgotten.

        It is the time of the decision: a decision never changes, so all copies have the same one, and no later one has it.
        """
        return self.decided_at
