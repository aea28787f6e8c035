"""The decisions that a small change of the threshold would turn."""

from collections.abc import Sequence
from heapq import nsmallest
from typing import Final, NamedTuple

from kp_scorer.decision import Decision

MOST_CALLS: Final = 8


class ClosestCalls(NamedTuple):
    """Those with scores next to their thresholds, the closest first."""

    accepted: list[Decision]
    missed: list[Decision]
    """Rejected, or to review."""


def closest_calls(decisions: Sequence[Decision], most: int = MOST_CALLS) -> ClosestCalls:
    """The closest on each side of the threshold, at most so many."""
    accepted = (decision for decision in decisions if decision.outcome == "accepted")
    missed = (decision for decision in decisions if decision.outcome != "accepted")
    return ClosestCalls(nsmallest(most, accepted, key=gap), nsmallest(most, missed, key=gap))


def gap(decision: Decision) -> float:
    """How far a score is from its threshold."""
    return abs(decision.score - decision.threshold)
