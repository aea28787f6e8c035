"""The score, as a pure function of a trace and its novelty. No I/O, no clock, no settings object.

The formulas are those of the KnowledgePulse reference SDK's ``evaluateValue``.
"""

from kp_scorer.scoring.dimensions import dimensions, novelty_of
from kp_scorer.scoring.policy import DEFAULT_THRESHOLD, Policy
from kp_scorer.scoring.profiles import DEFAULT_PROFILE, PROFILES, check_weights
from kp_scorer.scoring.score import Score, decide_again, score

__all__ = [
    "DEFAULT_PROFILE",
    "DEFAULT_THRESHOLD",
    "PROFILES",
    "Policy",
    "Score",
    "check_weights",
    "decide_again",
    "dimensions",
    "novelty_of",
    "score",
]
