"""The score, as a pure function of a trace and its novelty. No I/O, no clock, no settings object.

The formulas are those of the KnowledgePulse reference SDK's ``evaluateValue``.
"""

from worker.scoring.dimensions import dimensions, novelty_of
from worker.scoring.policy import Policy
from worker.scoring.profiles import DEFAULT_PROFILE, PROFILES, check_weights
from worker.scoring.score import Score, score

__all__ = ["DEFAULT_PROFILE", "PROFILES", "Policy", "Score", "check_weights", "dimensions", "novelty_of", "score"]
