"""All of the scorer's state in one Redis: ``store`` opens what the other modules define."""

from kp_scorer.store.store import Store

__all__ = ["Store"]
