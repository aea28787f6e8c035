"""The novelty of traces: an append-only log that all workers share, the mirror of each worker, and their joint cache."""

from kp_scorer.novelty.log import Candidate, MemoryLog, NoveltyLog, Window
from kp_scorer.novelty.mirror import NoveltyCache, Placement

__all__ = ["Candidate", "MemoryLog", "NoveltyCache", "NoveltyLog", "Placement", "Window"]
