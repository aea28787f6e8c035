"""Where Celery stores results, for producers who ask for one."""

from typing import Any

from celery.backends.redis import RedisBackend

from kp_scorer.store.connection import leave_replicas


class ResultBackend(RedisBackend):  # type: ignore[misc]  # celery ships no types
    """Celery's own, but that it follows a failover: else its connections would lead to what is now a replica for ever."""

    def _get_pool(self, **params: Any) -> Any:
        pool = super()._get_pool(**params)
        leave_replicas(pool)
        return pool
