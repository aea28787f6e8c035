"""The four dimensions of a trace, each in 0..1."""

from typing import Final

from kp_scorer.decision import Dimensions
from kp_scorer.trace import STEP_TYPES, ReasoningTrace

UNKNOWN_NOVELTY: Final = 0.5
"""Novelty when there is nothing to compare with: an empty cache, or no embedder."""

_STEPS_FOR_FULL_TERM: Final = 20


def novelty_of(similarity: float | None) -> float:
    """Novelty, 0..1, from the largest cosine similarity to an earlier trace; None if there is nothing to compare with."""
    return UNKNOWN_NOVELTY if similarity is None else min(1.0, max(0.0, 1.0 - similarity))


def dimensions(trace: ReasoningTrace, novelty: float, *, cap_step_term: bool = False) -> Dimensions:
    """Compute the dimensions of a trace whose novelty (0..1) is known.

    ``cap_step_term`` limits the step term of complexity to what 20 steps give; the reference has no such cap.
    """
    return Dimensions(
        complexity=_complexity(trace, cap_step_term=cap_step_term),
        novelty=novelty,
        tool_diversity=_tool_diversity(trace),
        outcome_confidence=trace.outcome.confidence * (1.0 if trace.metadata.success else 0.3),
    )


def tool_names(trace: ReasoningTrace) -> set[str]:
    """Names of the tools used; any step may name one, and the same name on two servers is one tool."""
    return {step.tool.name for step in trace.steps if step.tool is not None}


def recoveries(trace: ReasoningTrace) -> int:
    """How many steps recover from an error."""
    return sum(step.type == "error_recovery" for step in trace.steps)


def _complexity(trace: ReasoningTrace, *, cap_step_term: bool) -> float:
    """``min(1, types/4 * 0.5 + (0.3 if any recovery) + steps/20 * 0.2)``."""
    types = {step.type for step in trace.steps}
    steps = min(len(trace.steps), _STEPS_FOR_FULL_TERM) if cap_step_term else len(trace.steps)
    recovered = 0.3 if recoveries(trace) else 0.0
    return min(1.0, len(types) / len(STEP_TYPES) * 0.5 + recovered + steps / _STEPS_FOR_FULL_TERM * 0.2)


def _tool_diversity(trace: ReasoningTrace) -> float:
    """``min(1, unique tool names / max(1, steps) * 3)``."""
    return min(1.0, len(tool_names(trace)) / max(1, len(trace.steps)) * 3)
