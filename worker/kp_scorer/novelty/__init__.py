"""How new a trace is: an append-only log that all workers share, each worker's mirror of it, and the cache that joins them."""

from kp_scorer.novelty.cache import NoveltyCache, Placed
from kp_scorer.novelty.log import Candidate, NoveltyLog, Window
from kp_scorer.novelty.memory_log import MemoryLog

__all__ = ["Candidate", "MemoryLog", "NoveltyCache", "NoveltyLog", "Placed", "Window"]
