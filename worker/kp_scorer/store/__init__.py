"""What lies in Redis: ledger, dead letters, novelty logs, streams of decisions; every key and every script of theirs."""

from kp_scorer.store.dead_letters import DeadLetter, DeadLetters
from kp_scorer.store.decision_stream import DecisionStream, Publication
from kp_scorer.store.drops import Drops
from kp_scorer.store.ledger import (
    Committed,
    Death,
    Identity,
    Ledger,
    MemoryLedger,
    Record,
    Refusal,
    Standing,
    State,
    Tally,
    Verdict,
)
from kp_scorer.store.redis_ledger import RedisLedger
from kp_scorer.store.redis_log import RedisLog
from kp_scorer.store.store import Store
from kp_scorer.store.submissions import Claim, Counts, Submission, Waiting
from kp_scorer.store.tallies import Counted
from kp_scorer.store.workers import Timed, WorkerReport

__all__ = [
    "Claim",
    "Committed",
    "Counted",
    "Counts",
    "DeadLetter",
    "DeadLetters",
    "Death",
    "DecisionStream",
    "Drops",
    "Identity",
    "Ledger",
    "MemoryLedger",
    "Publication",
    "Record",
    "RedisLedger",
    "RedisLog",
    "Refusal",
    "Standing",
    "State",
    "Store",
    "Submission",
    "Tally",
    "Timed",
    "Verdict",
    "Waiting",
    "WorkerReport",
]
