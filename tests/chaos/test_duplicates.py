"""Copies of one message in flight in many workers at once: none of them makes the trace poison."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.settings import Settings

from tests.support.arena import Arena, supervised, traces


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "count", "copies", "embed_s", "worker_settings"),
    [
        pytest.param(4, 5, 14, "0.3", {"worker__batch_size": 1}, id="to idle workers"),
        pytest.param(1, 1, 60, "0.1", {"worker__concurrency": 96}, id="to one worker"),
    ],
)
def test_copies_are_decided_once(
    arena: Arena, workers: int, count: int, copies: int, embed_s: str, worker_settings: Mapping[str, int]
) -> None:
    # A single attempt would be one too many.
    settings = arena.settings(worker__max_attempts=1, **worker_settings)
    load = traces(count)
    with supervised(settings, arena.directory, workers, lambda place, life: {"EMBED_S": embed_s}) as fleet:
        fleet.wait_until_ready()
        _send(settings, [trace for trace in load for _ in range(copies)])
        arena.finish(fleet, [str(trace["id"]) for trace in load])


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_copies_of_the_same_bytes(arena: Arena) -> None:
    settings = arena.settings(worker__max_attempts=1, worker__concurrency=96)
    (trace,) = traces(1)
    _send(settings, [trace])
    with arena.redis.connect() as redis_client:
        (item,) = redis_client.lrange(settings.queues.traces, 0, -1)
        redis_client.lpush(settings.queues.traces, *[item] * 59)
    with supervised(settings, arena.directory, 1, lambda place, life: {"EMBED_S": "0.3"}) as fleet:
        arena.finish(fleet, [str(trace["id"])])


def _send(settings: Settings, load: Iterable[Mapping[str, Any]]) -> None:
    with make_celery(settings) as foreign:
        for trace in load:
            foreign.send_task(TASK_NAME, args=[trace], queue=settings.queues.traces, ignore_result=True)
