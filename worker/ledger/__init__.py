"""The record of every trace: pending, decided or dead."""

from worker.ledger.ledger import Ledger, MemoryLedger, Opening, Record, State, Verdict
from worker.ledger.redis_ledger import Claim, Counts, RedisLedger, Submission

__all__ = ["Claim", "Counts", "Ledger", "MemoryLedger", "Opening", "Record", "RedisLedger", "State", "Submission", "Verdict"]
