"""How new a trace is: an append-only log that all workers share, each one's mirror of it, and the cache that joins them."""

from worker.novelty.cache import NoveltyCache
from worker.novelty.log import Candidate, NoveltyLog, Window
from worker.novelty.memory_log import MemoryLog
from worker.novelty.redis_log import RedisLog

__all__ = ["Candidate", "MemoryLog", "NoveltyCache", "NoveltyLog", "RedisLog", "Window"]
