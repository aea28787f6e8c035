"""What another policy would decide otherwise."""

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from kp_scorer.analysis.domains import Domain
from kp_scorer.decision import Outcome
from kp_scorer.scoring import Policy, decide_again


class Flip(NamedTuple):
    """What was decided, and what the other policy would decide in its place."""

    was: Outcome
    would_be: Outcome


def flips_of(domain: Domain, policy: Policy) -> Mapping[Flip, int]:
    """How many decisions of a domain another policy would turn, in each way."""
    both = (Flip(decision.outcome, decide_again(decision, policy).outcome) for decision in domain.decisions)
    return Counter(flip for flip in both if flip.was != flip.would_be)
