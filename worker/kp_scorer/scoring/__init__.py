"""The score, as a pure function of a trace and its novelty. No I/O, no clock, no settings object.

The formulas are those of the KnowledgePulse reference SDK's ``evaluateValue``.
"""

from kp_scorer.scoring.dimensions import (
    UNKNOWN_NOVELTY,
    ComplexityTerms,
    complexity_terms,
    dimensions,
    novelty_of,
    recoveries,
    success_factor,
    tool_names,
)
from kp_scorer.scoring.policy import DEFAULT_THRESHOLD, Policy, fingerprint
from kp_scorer.scoring.profiles import DEFAULT_PROFILE, PROFILES, check_weights
from kp_scorer.scoring.score import Score, decide_again, score

__all__ = [
    "DEFAULT_PROFILE",
    "DEFAULT_THRESHOLD",
    "PROFILES",
    "UNKNOWN_NOVELTY",
    "ComplexityTerms",
    "Policy",
    "Score",
    "check_weights",
    "complexity_terms",
    "decide_again",
    "dimensions",
    "fingerprint",
    "novelty_of",
    "recoveries",
    "score",
    "success_factor",
    "tool_names",
]
