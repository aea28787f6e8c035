"""The gate of coverage: what a trace adds to the kept ones, the facts that this rests on, and their audit."""

from kp_scorer.gate.batch import Batch, GatePolicy, Weighed
from kp_scorer.gate.domain import GateBounds
from kp_scorer.gate.facts import Fact, FactLog, MemoryFacts
from kp_scorer.gate.gate import Gate

__all__ = ["Batch", "Fact", "FactLog", "Gate", "GateBounds", "GatePolicy", "MemoryFacts", "Weighed"]
