"""The four dimensions of a trace, each in 0..1."""

from typing import Final, NamedTuple

from kp_scorer.decision import Dimensions
from kp_scorer.trace import STEP_TYPES, ReasoningTrace

UNKNOWN_NOVELTY: Final = 0.5
"""Novelty when there is nothing to compare with: an empty cache, or no embedder."""

_STEPS_FOR_FULL_TERM: Final = 20


class ComplexityTerms(NamedTuple):
    """What complexity is the sum of, before it is limited to 1."""

    types: float
    """0.5 for all four types of steps, in equal parts."""
    recovery: float
    """0.3 if any step recovers from an error."""
    steps: float
    """0.2 for every 20 steps."""

    @property
    def complexity(self) -> float:
        """The dimension, 0..1."""
        return min(1.0, self.types + self.recovery + self.steps)


def novelty_of(similarity: float | None) -> float:
    """Novelty, 0..1, from the largest cosine similarity to an earlier trace; None if there is nothing to compare with."""
    return UNKNOWN_NOVELTY if similarity is None else min(1.0, max(0.0, 1.0 - similarity))


def dimensions(trace: ReasoningTrace, novelty: float, *, cap_step_term: bool = False) -> Dimensions:
    """Compute the dimensions of a trace whose novelty (0..1) is known.

    ``cap_step_term`` limits the step term of complexity to what 20 steps give; the reference has no such cap.
    """
    return Dimensions(
        complexity=complexity_terms(trace, cap_step_term=cap_step_term).complexity,
        novelty=novelty,
        tool_diversity=_tool_diversity(trace),
        outcome_confidence=trace.outcome.confidence * success_factor(trace),
    )


def tool_names(trace: ReasoningTrace) -> set[str]:
    """Names of the tools used; any step may name one, and the same name on two servers is one tool."""
    return {step.tool.name for step in trace.steps if step.tool is not None}


def recoveries(trace: ReasoningTrace) -> int:
    """How many steps recover from an error."""
    return sum(step.type == "error_recovery" for step in trace.steps)


def success_factor(trace: ReasoningTrace) -> float:
    """By what the confidence is multiplied: a failure leaves three tenths of it."""
    return 1.0 if trace.metadata.success else 0.3


def complexity_terms(trace: ReasoningTrace, *, cap_step_term: bool = False) -> ComplexityTerms:
    """The terms of a trace's complexity, of which there is no more than 1."""
    types = {step.type for step in trace.steps}
    steps = min(len(trace.steps), _STEPS_FOR_FULL_TERM) if cap_step_term else len(trace.steps)
    return ComplexityTerms(
        types=len(types) / len(STEP_TYPES) * 0.5,
        recovery=0.3 if recoveries(trace) else 0.0,
        steps=steps / _STEPS_FOR_FULL_TERM * 0.2,
    )


def _tool_diversity(trace: ReasoningTrace) -> float:
    """``min(1, unique tool names / max(1, steps) * 3)``."""
    return min(1.0, len(tool_names(trace)) / max(1, len(trace.steps)) * 3)
