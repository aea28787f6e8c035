"""All of the scorer's state in one Redis.

Its modules from the bottom up:

``connection``, ``condition``, ``keys`` and ``scripts`` with ``lua/``, which the queues in ``broker.redis_transport`` use too;
``records``; ``ledger``, ``dead_letters``, ``novelty_log``, ``copies``, ``pinned_sets``, ``runs``, ``decision_stream``,
``usage``;
``store``, which opens them.
"""

from kp_scorer.store.store import Store

__all__ = ["Store"]
