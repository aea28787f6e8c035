"""Why a decision came out as it did: its arithmetic, and with what it would have passed."""

from typing import Final, NamedTuple

from kp_scorer.decision import Decision, Dimensions, Override
from kp_scorer.scoring import (
    DEFAULT_PROFILE,
    ComplexityTerms,
    Policy,
    complexity_terms,
    decide_again,
    dimensions,
    recoveries,
    success_factor,
    tool_names,
)
from kp_scorer.trace import ReasoningTrace

DIMENSIONS: Final = tuple(Dimensions.model_fields)

_HALVINGS: Final = 50
"""How closely the lowest value that passes is looked for: to the last bits of a number in 0..1."""
_SHOWN: Final = 240


class Term(NamedTuple):
    """What one dimension brings to a decision."""

    dimension: str
    value: float
    weight: float
    product: float
    """Of the two: its part of the composite."""
    least: float | None
    """The lowest value, 0..1, with which the trace passes if all else stays as it is; None if not even 1 is enough."""


class Without(NamedTuple):
    """What a decision would have been if an override had not fired, and all else had stayed as it is."""

    override: Override
    score: float
    passes: bool


class Explanation(NamedTuple):
    """The arithmetic of a decision."""

    decision: Decision
    terms: tuple[Term, ...]
    """In the order of the dimensions."""
    without: tuple[Without, ...]
    """For each override that fired."""

    @property
    def margin(self) -> float:
        """How far the score is above the threshold; below 0 it is that much short of it."""
        return self.decision.score - self.decision.threshold


class Origin(NamedTuple):
    """How the dimensions of a trace came about."""

    types: tuple[str, ...]
    """The types of its steps, in the order in which they first come."""
    complexity: ComplexityTerms
    is_capped: bool
    """Whether more than 20 steps counted as 20."""
    recoveries: int
    steps: int
    tools: tuple[str, ...]
    """Names of the tools, each once."""
    confidence: float
    success: bool
    success_factor: float
    is_of_this: bool
    """Whether these are the dimensions of the decision; if not, it was made on other content."""


class Said(NamedTuple):
    """What a trace says, shortened."""

    asked: str
    """The objective."""
    did: str
    """What its tool calls say, then its thoughts and recoveries; what all of its steps say, if that is nothing."""


def explain(decision: Decision) -> Explanation:
    """Take a decision apart; it needs nothing but the decision."""
    parts, weights = decision.dimensions.model_dump(), decision.weights.model_dump()
    terms = (Term(name, parts[name], weights[name], parts[name] * weights[name], _least(decision, name)) for name in DIMENSIONS)
    return Explanation(decision, tuple(terms), tuple(_without(decision, fired.name) for fired in decision.overrides))


def with_dimension(decision: Decision, dimension: str, value: float) -> Decision:
    """What a decision would have been with another value, 0..1, of one dimension."""
    changed = decision.dimensions.model_copy(update={dimension: value})
    return decide_again(decision.model_copy(update={"dimensions": changed}), _own_policy(decision))


def origin(trace: ReasoningTrace, decision: Decision) -> Origin:
    """Say how the dimensions of a decision came about, from the trace that it is on."""
    novelty, decided = decision.dimensions.novelty, decision.dimensions
    # The decision does not say whether the step term was capped.
    is_capped = dimensions(trace, novelty) != decided and dimensions(trace, novelty, cap_step_term=True) == decided
    return Origin(
        types=tuple(dict.fromkeys(step.type for step in trace.steps)),
        complexity=complexity_terms(trace, cap_step_term=is_capped),
        is_capped=is_capped,
        recoveries=recoveries(trace),
        steps=len(trace.steps),
        tools=tuple(sorted(tool_names(trace))),
        confidence=trace.outcome.confidence,
        success=trace.metadata.success,
        success_factor=success_factor(trace),
        is_of_this=is_capped or dimensions(trace, novelty) == decided,
    )


def said(trace: ReasoningTrace) -> Said:
    """What a trace was asked and did, each in 240 characters at most."""
    return Said(_shortened(trace.task.objective), _shortened(trace.did))


def _shortened(text: str) -> str:
    words = " ".join(text[: 10 * _SHOWN].split())
    return words if len(words) <= _SHOWN else words[: _SHOWN - 1].rstrip() + "…"


def _own_policy(decision: Decision) -> Policy:
    """A policy by which the decision's own domain gets what it got; which profile that was is of no account."""
    return Policy(profiles={DEFAULT_PROFILE: decision.weights}, threshold=decision.threshold, review=decision.review)


def _least(decision: Decision, dimension: str) -> float | None:
    def passes(value: float) -> bool:
        return with_dimension(decision, dimension, value).outcome == "accepted"

    if passes(0.0):
        return 0.0
    if not passes(1.0):
        return None
    # The score never falls as a dimension rises, through all overrides. Solved by a formula, it could end a bit too low.
    short, enough = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (short + enough) / 2
        short, enough = (short, middle) if passes(middle) else (middle, enough)
    return enough


def _without(decision: Decision, override: Override) -> Without:
    others = tuple(fired for fired in decision.overrides if fired.name != override)
    again = decide_again(decision.model_copy(update={"overrides": others}), _own_policy(decision))
    return Without(override, again.score, again.outcome == "accepted")
