"""What lies in Redis: ledger, dead letters, novelty logs, streams of decisions; every key and every script of theirs."""

from kp_scorer.store.store import Store

__all__ = ["Store"]
