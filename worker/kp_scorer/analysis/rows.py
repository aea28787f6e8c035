"""Decisions as flat rows, for tables of any kind."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from kp_scorer.decision import Decision


class Row(NamedTuple):
    """A decision without any nesting. Every row has these fields, in this order and of these types."""

    trace_id: str
    domain: str
    taken_for: str | None
    """The domain whose profile and bounds counted, where the trace's own is an alias for it."""
    outcome: str
    """``accepted``, ``review`` or ``rejected``."""
    score: float
    """0..1, as all scores, weights and dimensions are."""
    composite: float
    """The weighted sum before any override."""
    threshold: float
    threshold_source: str
    """``default``, ``domain`` or ``submission``."""
    review: float | None
    """The score from which a trace that is not accepted goes to review; None where none does."""
    complexity: float
    novelty: float
    tool_diversity: float
    outcome_confidence: float
    profile: str
    complexity_weight: float
    novelty_weight: float
    tool_diversity_weight: float
    outcome_confidence_weight: float
    single_thought: bool
    """Whether this override fired, as the next two."""
    recovered_from_errors: bool
    single_tool: bool
    novelty_source: str
    """``embedding``, ``empty_cache`` or ``no_embedder``."""
    nearest_id: str | None
    """The most similar earlier trace; None where there was nothing to compare with."""
    similarity: float | None
    """The cosine similarity to it, -1..1."""
    duplicate_of: str | None
    """The earliest trace with the same content; None if there is none."""
    embedder: str | None
    space: str | None
    entry: str | None
    """The place in the novelty log, ``<ms>-<number>``."""
    look_up_ms: float
    embed_ms: float
    place_ms: float
    batch_size: int
    decided_at: datetime
    """In UTC. Polars leaves the zone out."""


def rows(decisions: Iterable[Decision]) -> list[Row]:
    """Flatten decisions into rows, in order, as ``pandas.DataFrame`` and ``polars.DataFrame`` take them.

    Raises:
        ValueError: a decision's ``decided_at`` is no ISO 8601 date and time.
    """
    return [_row(decision) for decision in decisions]


def _row(decision: Decision) -> Row:
    parts, weights, novelty, timings = decision.dimensions, decision.weights, decision.novelty, decision.timings
    fired = {override.name for override in decision.overrides}
    return Row(
        trace_id=decision.trace_id,
        domain=decision.domain,
        taken_for=decision.taken_for,
        outcome=decision.outcome,
        score=decision.score,
        composite=decision.composite,
        threshold=decision.threshold,
        threshold_source=decision.threshold_source,
        review=decision.review,
        complexity=parts.complexity,
        novelty=parts.novelty,
        tool_diversity=parts.tool_diversity,
        outcome_confidence=parts.outcome_confidence,
        profile=decision.profile,
        complexity_weight=weights.complexity,
        novelty_weight=weights.novelty,
        tool_diversity_weight=weights.tool_diversity,
        outcome_confidence_weight=weights.outcome_confidence,
        single_thought="single_thought" in fired,
        recovered_from_errors="recovered_from_errors" in fired,
        single_tool="single_tool" in fired,
        novelty_source=novelty.source,
        nearest_id=novelty.nearest.trace_id if novelty.nearest else None,
        similarity=novelty.nearest.similarity if novelty.nearest else None,
        duplicate_of=novelty.duplicate_of,
        embedder=novelty.embedder,
        space=novelty.space,
        entry=novelty.entry,
        look_up_ms=timings.look_up_ms,
        embed_ms=timings.embed_ms,
        place_ms=timings.place_ms,
        batch_size=timings.batch_size,
        decided_at=_in_utc(decision.decided_at),
    )


def _in_utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
