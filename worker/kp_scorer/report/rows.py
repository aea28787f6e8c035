"""Flattens decisions into rows for tables."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple, get_args

from kp_scorer.decision import Decision, Override, Received


class _Fields(NamedTuple):
    trace_id: str
    domain: str
    agent_id: str | None
    framework: str | None
    visibility: str | None
    """``private``, ``org`` or ``network``."""
    privacy_level: str | None
    """``aggregated``, ``federated`` or ``private``."""
    taken_for: str | None
    """The domain whose profile and bounds applied, if the trace's own domain is an alias for it."""
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
    """The score from which a trace that is not accepted goes to review; None if none does."""
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
    """True if this override fired; likewise for the next two."""
    recovered_from_errors: bool
    single_tool: bool
    is_guarded: bool
    """True if a guard or a check kept the trace from being accepted, whatever its score."""
    sampled: float | None
    """The share of all traces that is sampled for ``kp-scorer quality``, where this one weighs 1 / share; None if it is not."""
    novelty_source: str
    """``embedding``, ``empty_cache``, ``no_embedder`` or ``unreadable``."""
    nearest_id: str | None
    """The most similar earlier trace; None if there was nothing to compare with."""
    similarity: float | None
    """The cosine similarity to it, -1..1."""
    duplicate_of: str | None
    """The earliest trace with the same content; None if there is none."""
    embedder: str | None
    embedded_tokens: int | None
    unknown_tokens: int | None
    text_tokens: int | None
    """None if the text has more tokens than were embedded."""
    space: str | None
    entry: str | None
    """The place in the novelty log, ``<ms>-<number>``."""
    worker: str | None
    """The worker that decided; None offline."""
    queued_ms: int | None
    """None if the trace does not say when it was sent."""
    deliveries: int | None
    held_ms: float | None
    look_up_ms: float
    wait_ms: float
    embed_ms: float
    place_ms: float
    batch_size: int
    decided_at: datetime
    """In UTC. Polars omits the zone."""


class Row(_Fields):
    """A decision without any nesting. Every row has these fields, in this order and of these types."""

    __slots__ = ()
    # polars 2.1 reads the types of columns from the annotations of a row, which from Python 3.14 on does not inherit them.
    # Without types it takes a column that begins with None for a column of nulls, and refuses its first value.
    __annotations__ = _Fields.__annotations__


def rows(decisions: Iterable[Decision]) -> list[Row]:
    """Return decisions as flat rows, in order, for ``pandas.DataFrame`` and ``polars.DataFrame``."""
    return [_row(decision) for decision in decisions]


def _row(decision: Decision) -> Row:
    novelty, nearest = decision.novelty, decision.novelty.nearest
    fired = {override.name for override in decision.overrides}
    fields = {
        **dict(decision),
        **dict(decision.dimensions),
        **{f"{name}_weight": weight for name, weight in decision.weights},
        **{name: name in fired for name in get_args(Override)},
        **dict(novelty),
        **dict.fromkeys(Received.model_fields),
        **dict(decision.received or ()),
        **dict(decision.timings),
        "is_guarded": decision.is_guarded,
        "novelty_source": novelty.source,
        "nearest_id": nearest.trace_id if nearest else None,
        "similarity": nearest.similarity if nearest else None,
        "decided_at": datetime.fromisoformat(decision.decided_at).astimezone(UTC),
    }
    return Row(**{name: fields[name] for name in Row._fields})
