"""A message that was delivered too often ends as a dead letter, and whoever asked for its result is told."""

import hashlib
from pathlib import Path
from typing import Any

import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.processes import FAST_WORKER, start_worker
from tests.support.traces import fresh_samples


def test_who_waits_for_the_result_of_a_poisonous_message_is_told(
    settings: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    (trace,) = fresh_samples(1)
    with make_celery(settings) as caller:
        result = caller.send_task(TASK_NAME, args=[trace], queue=settings.queues.traces, ignore_result=False)
        item: Any = redis_client.lindex(settings.queues.traces, 0)
        redis_client.hset("traces.deliveries", hashlib.sha1(item).hexdigest(), str(settings.broker.delivery_limit))
        with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER):
            detail = f"delivered {settings.broker.delivery_limit} times, and no worker came to an end with it"
            assert result.get(timeout=30) == {"trace_id": "", "state": "dead", "reason": "poison", "detail": detail}
    (letter,) = store.dead_letters.read()
    assert (letter.reason, letter.trace_id, letter.detail) == ("poison", trace["id"], detail)
