"""Dimensions to score: the weighted sum, then the overrides."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kp_scorer.decision import Decision, Dimensions, FiredOverride, Override
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
    parts = dimensions(trace, novelty, cap_step_term=policy.cap_step_term)
    return _score(trace.metadata.task_domain, parts, _overrides(trace), policy)


def decide_again(decision: Decision, policy: Policy) -> Decision:
    """What a trace's decision would have been by another policy.

    What depends on the trace itself stays: its dimensions, ``policy.cap_step_term`` notwithstanding, which overrides fire, and
    the threshold that its submission asked for, if it was obeyed.
    """
    scored = _score(decision.domain, decision.dimensions, (fired.name for fired in decision.overrides), policy)
    bounds = policy.bounds(decision.domain, decision.threshold if decision.threshold_source == "submission" else None)
    again = {
        "outcome": bounds.outcome(scored.value),
        "score": scored.value,
        "threshold": bounds.threshold,
        "threshold_source": bounds.source,
        "review": bounds.review,
        "taken_for": policy.aliases.get(decision.domain),
        "profile": scored.profile,
        "weights": scored.weights,
        "composite": scored.composite,
        "overrides": scored.overrides,
    }
    return decision.model_copy(update=again)


def _score(domain: str, parts: Dimensions, overrides: Iterable[Override], policy: Policy) -> Score:
    profile = policy.profile(domain)
    weights = policy.profiles[profile]
    composite = _composite(parts, weights)
    fired = tuple(_fired(overrides, composite))
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


def _overrides(trace: ReasoningTrace) -> Iterator[Override]:
    """The rules that change the score of a trace, in the order in which they apply."""
    if len(trace.steps) == 1 and trace.steps[0].type == "thought":
        yield "single_thought"
    if recoveries(trace) > 2 and trace.metadata.success:
        yield "recovered_from_errors"
    if len(tool_names(trace)) == 1:
        yield "single_tool"


def _fired(overrides: Iterable[Override], composite: float) -> Iterator[FiredOverride]:
    """Apply each rule to the result of the one before."""
    value = composite
    for name in overrides:
        match name:
            case "single_thought":
                value = 0.1
            case "recovered_from_errors":
                value = min(1.0, value + 0.1)
            case "single_tool":
                value = max(0.0, value - 0.1)
        yield FiredOverride(name=name, score=value)
