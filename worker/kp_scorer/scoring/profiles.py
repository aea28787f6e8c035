"""Weights of the four dimensions, by domain."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kp_scorer.decision import Dimensions

DEFAULT_PROFILE: Final = "default"


def _weights(complexity: float, novelty: float, tool_diversity: float, outcome_confidence: float) -> Dimensions:
    return Dimensions(
        complexity=complexity, novelty=novelty, tool_diversity=tool_diversity, outcome_confidence=outcome_confidence
    )


PROFILES: Final[Mapping[str, Dimensions]] = MappingProxyType(
    {
        DEFAULT_PROFILE: _weights(0.25, 0.35, 0.15, 0.25),
        "finance": _weights(0.20, 0.25, 0.10, 0.45),
        "code": _weights(0.20, 0.30, 0.30, 0.20),
        "medical": _weights(0.15, 0.20, 0.10, 0.55),
        "customer_service": _weights(0.20, 0.30, 0.20, 0.30),
    }
)
"""The reference SDK's profiles. A domain that is not among them, matched exactly, gets the default."""


def check_weights(weights: Dimensions) -> Dimensions:
    """Return the weights if they sum to 1 (each is in 0..1 by its type); raise ValueError otherwise."""
    total = math.fsum((weights.complexity, weights.novelty, weights.tool_diversity, weights.outcome_confidence))
    if not math.isclose(total, 1.0, abs_tol=1e-9):
        raise ValueError(f"weights must sum to 1, these sum to {total:g}")
    return weights
