"""The gate of coverage: what a trace adds to the kept ones, the facts that this rests on, and their audit."""

from kp_scorer.gate.facts import Fact, FactLog, MemoryFacts
from kp_scorer.gate.gate import Batch, Gate, GateBounds, GatePolicy, Weighed

__all__ = ["Batch", "Fact", "FactLog", "Gate", "GateBounds", "GatePolicy", "MemoryFacts", "Weighed"]
