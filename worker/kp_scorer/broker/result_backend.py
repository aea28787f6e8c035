"""Where Celery stores results, for producers who ask for one. Celery loads it by name, as its import takes 80 ms."""

from typing import Any

from celery.backends.redis import RedisBackend

from kp_scorer.ledger.connection import leave_replicas


class ResultBackend(RedisBackend):  # type: ignore[misc]  # celery ships no types
    """Celery's backend, following a failover: otherwise its connections would stay with the former master, now a replica."""

    def _get_pool(self, **params: Any) -> Any:
        pool = super()._get_pool(**params)
        leave_replicas(pool)
        return pool
