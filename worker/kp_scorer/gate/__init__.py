"""Accepts traces for what they add to the kept ones, by the facts that earlier decisions left, and audits the decisions."""

from kp_scorer.gate.batch import Batch, GatePolicy
from kp_scorer.gate.domain import GateBounds
from kp_scorer.gate.facts import Fact, FactLog, MemoryFacts
from kp_scorer.gate.gate import Gate

__all__ = ["Batch", "Fact", "FactLog", "Gate", "GateBounds", "GatePolicy", "MemoryFacts"]
