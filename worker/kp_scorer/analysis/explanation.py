"""Why a decision came out as it did: its arithmetic, and what it would have taken to pass."""

from bisect import bisect_left
from typing import Final, NamedTuple

from kp_scorer.decision import Decision, GuardName
from kp_scorer.scoring import DEFAULT_PROFILE, Policy, decide_again, dimensions
from kp_scorer.trace import ReasoningTrace

_STEPS: Final = 2**50  # Among so many values in 0..1 the lowest that passes is looked for: enough for the last bits.


class Term(NamedTuple):
    """What one dimension contributes to a score."""

    dimension: str
    value: float
    weight: float
    product: float
    """Of the two: its part of the composite."""
    least: float | None
    """The lowest value, 0..1, with which the trace passes, all else being as it is; None if not even 1 is enough."""


def terms_of(decision: Decision) -> list[Term]:
    """What each dimension contributes, in the order of the dimensions."""
    parts, weights = decision.dimensions.model_dump(), decision.weights.model_dump()
    return [Term(name, parts[name], weights[name], parts[name] * weights[name], _least(decision, name)) for name in parts]


def with_dimension(decision: Decision, dimension: str, value: float) -> Decision:
    """What a decision would have been with another value, 0..1, of one dimension, by the policy that it was decided by."""
    changed = decision.dimensions.model_copy(update={dimension: value})
    policy = Policy(
        # The name of the profile does not matter.
        profiles={DEFAULT_PROFILE: decision.weights},
        threshold=decision.threshold,
        review=decision.review,
        min_novelty=bound_of(decision, "min_novelty", 0.0),
        copies="reject" if any(guard.name == "copies" for guard in decision.guards) else "score",
    )
    return decide_again(decision.model_copy(update={"dimensions": changed}), policy)


def was_capped(trace: ReasoningTrace, decision: Decision) -> bool | None:
    """Whether more than 20 steps counted as 20, which decisions do not record; None if the decision is on other content."""
    most = bound_of(decision, "max_confidence")
    for capped in (False, True):
        if dimensions(trace, decision.dimensions.novelty, cap_step_term=capped, max_confidence=most) == decision.dimensions:
            return capped
    return None


def bound_of(decision: Decision, name: GuardName, default: float = 1.0) -> float:
    """The bound, 0..1, of the guard of this name, if it applied to the decision."""
    return next((guard.bound for guard in decision.guards if guard.name == name and guard.bound is not None), default)


def _least(decision: Decision, dimension: str) -> float | None:
    def passes(step: int) -> bool:
        return with_dimension(decision, dimension, step / _STEPS).outcome == "accepted"

    # The score never falls as a dimension rises, whatever the overrides. A formula could give a value some bits too low.
    step = bisect_left(range(_STEPS + 1), True, key=passes)
    return step / _STEPS if step <= _STEPS else None
