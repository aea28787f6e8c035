"""Dimensions to score: the weighted sum, then the overrides."""

from collections.abc import Iterator
from dataclasses import dataclass

from kp_scorer.decision import Dimensions, FiredOverride, Override
from kp_scorer.scoring.dimensions import dimensions, recoveries, tool_names
from kp_scorer.scoring.policy import Policy
from kp_scorer.trace import ReasoningTrace


@dataclass(frozen=True, slots=True)
class Score:
    """A score and the parts it is computed from."""

    value: float
    """The score, 0..1, after the overrides."""
    dimensions: Dimensions
    profile: str
    weights: Dimensions
    composite: float
    """The weighted sum, 0..1, before the overrides."""
    overrides: tuple[FiredOverride, ...]


def score(trace: ReasoningTrace, novelty: float, policy: Policy) -> Score:
    """Score a trace whose novelty (0..1) is known."""
    profile = policy.profile(trace.metadata.task_domain)
    weights = policy.profiles[profile]
    parts = dimensions(trace, novelty, cap_step_term=policy.cap_step_term)
    composite = _composite(parts, weights)
    fired = tuple(_overrides(trace, composite))
    return Score(
        value=fired[-1].score if fired else composite,
        dimensions=parts,
        profile=profile,
        weights=weights,
        composite=composite,
        overrides=fired,
    )


def _composite(parts: Dimensions, weights: Dimensions) -> float:
    total = (
        parts.complexity * weights.complexity
        + parts.novelty * weights.novelty
        + parts.tool_diversity * weights.tool_diversity
        + parts.outcome_confidence * weights.outcome_confidence
    )
    # Four dimensions of 1 can sum to 1 + 2e-16, which is not a valid score.
    return min(1.0, total)


def _overrides(trace: ReasoningTrace, composite: float) -> Iterator[FiredOverride]:
    """Apply the overrides in order, each to the result of the one before."""
    value = composite

    def fire(name: Override) -> FiredOverride:
        return FiredOverride(name=name, score=value)

    if len(trace.steps) == 1 and trace.steps[0].type == "thought":
        value = 0.1
        yield fire("single_thought")
    if recoveries(trace) > 2 and trace.metadata.success:
        value = min(1.0, value + 0.1)
        yield fire("recovered_from_errors")
    if len(tool_names(trace)) == 1:
        value = max(0.0, value - 0.1)
        yield fire("single_tool")
