"""What lies in Redis: ledger, dead letters, novelty logs, streams of decisions; every key and every script of theirs."""

from kp_scorer.ledger.dead_letters import DeadLetter, DeadLetters
from kp_scorer.ledger.decision_stream import DecisionStream, Publication, Published, StreamReader
from kp_scorer.ledger.log import RedisLog
from kp_scorer.ledger.monitoring import Timing, WorkerReport
from kp_scorer.ledger.records import (
    CommitResult,
    Identity,
    LostSubmission,
    MemoryLedger,
    Record,
    Submission,
    SubmissionCounts,
    Tally,
    TraceState,
    Verdict,
)
from kp_scorer.ledger.redis_ledger import Ledger, RedisLedger
from kp_scorer.ledger.store import Store

__all__ = [
    "CommitResult",
    "DeadLetter",
    "DeadLetters",
    "DecisionStream",
    "Identity",
    "Ledger",
    "LostSubmission",
    "MemoryLedger",
    "Publication",
    "Published",
    "Record",
    "RedisLedger",
    "RedisLog",
    "Store",
    "StreamReader",
    "Submission",
    "SubmissionCounts",
    "Tally",
    "Timing",
    "TraceState",
    "Verdict",
    "WorkerReport",
]
