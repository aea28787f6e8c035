"""The record of every trace: pending, decided or dead."""

from worker.ledger.ledger import Ledger, MemoryLedger, Record, State, Verdict
from worker.ledger.redis_ledger import RedisLedger

__all__ = ["Ledger", "MemoryLedger", "Record", "RedisLedger", "State", "Verdict"]
