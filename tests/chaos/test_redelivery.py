"""A trace is decided once even if its message is redelivered too early or delivered twice at once, or if clocks are wrong."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.settings import Settings

from tests.support.arena import TRACES, Arena, submit, supervised, traces, wait_until_ended
from tests.support.crashing_worker import STALLS
from tests.support.processes import SOON_STALLED, wait_until

pytestmark = pytest.mark.slow


def test_visibility_timeout_shorter_than_a_stalled_batch(arena: Arena) -> None:
    def stall(place: int, life: int) -> Mapping[str, str]:
        return {"STALL_S": "7" if place == 0 else "0"}

    load = [*traces(TRACES - 10), *traces(10, STALLS)]
    with supervised(arena.settings(), arena.directory, 2, stall) as fleet, Client(arena.settings()) as client:
        fleet.wait_until_ready()
        arena.finish(fleet, submit(client, load))
        assert fleet.ends == [], "a worker ended that was only slow"


def test_stalled_worker_ends_and_another_decides(arena: Arena) -> None:
    def stall(place: int, life: int) -> Mapping[str, str]:
        # On a busy machine the worker that follows may well make no progress for three seconds.
        return {"STALL_S": "600", **SOON_STALLED} if life == 0 else {"STALL_S": "0"}

    load = [*traces(10, STALLS), *traces(TRACES - 10)]
    settings = arena.settings()
    with supervised(settings, arena.directory, 1, stall) as fleet, Client(settings) as client:
        submitted = submit(client, load)
        wait_until(lambda: fleet.ends)
        arena.finish(fleet, submitted)
        assert fleet.logged("worker_stalled") == 1
        assert fleet.ends == [4]


def test_clocks_that_are_an_hour_off(arena: Arena) -> None:
    def clock(place: int, life: int) -> Mapping[str, str]:
        return {"CLOCK_OFFSET_S": str((3_600, -3_600, 0)[place]), "EMBED_S": "0.1"}

    load = traces()
    half = TRACES // 2
    with Client(arena.settings()) as client, supervised(arena.settings(), arena.directory, 3, clock) as fleet:
        submitted = submit(client, load[:half])
        fleet.wait_until_ready()
        wait_until(lambda: fleet[0].events("trace_decided") and fleet[1].events("trace_decided"))
        # Messages in flight in the killed workers must be redelivered as soon as any others, not in an hour.
        fleet.kill(0)
        fleet.kill(1)
        submitted += submit(client, load[half:])
        wait_until_ended(arena.settings(), submitted)
        arena.finish(fleet, submitted)
        # The killed workers may have decided messages without acknowledging them; those are decided again.
        most_in_flight = 2 * arena.settings().worker.concurrency
        assert fleet.logged("trace_decided") <= len(submitted) + most_in_flight, "messages of live workers were redelivered"


@pytest.mark.parametrize(
    ("workers", "count", "copies", "embed_s", "worker_settings"),
    [
        pytest.param(4, 5, 14, "0.3", {"worker__concurrency": 5}, id="to idle workers"),
        pytest.param(1, 1, 60, "0.1", {"worker__concurrency": 96}, id="to one worker"),
    ],
)
def test_copies_are_decided_once(
    arena: Arena, workers: int, count: int, copies: int, embed_s: str, worker_settings: Mapping[str, int]
) -> None:
    # With one attempt allowed, a second one for the same trace would dead-letter it.
    settings = arena.settings(worker__max_attempts=1, **worker_settings)
    load = traces(count)
    with supervised(settings, arena.directory, workers, lambda place, life: {"EMBED_S": embed_s}) as fleet:
        fleet.wait_until_ready()
        _send(settings, [trace for trace in load for _ in range(copies)])
        arena.finish(fleet, [str(trace["id"]) for trace in load])


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_copies_of_the_same_bytes(arena: Arena) -> None:
    settings = arena.settings(worker__max_attempts=1, worker__concurrency=96)
    (trace,) = traces(1)
    _send(settings, [trace])
    with arena.redis.connect() as redis_client:
        (item,) = redis_client.lrange(settings.queues.first, 0, -1)
        redis_client.lpush(settings.queues.first, *[item] * 59)
    with supervised(settings, arena.directory, 1, lambda place, life: {"EMBED_S": "0.3"}) as fleet:
        arena.finish(fleet, [str(trace["id"])])


def _send(settings: Settings, load: Iterable[Mapping[str, Any]]) -> None:
    with make_celery(settings) as foreign:
        for trace in load:
            foreign.send_task(TASK_NAME, args=[trace], queue=settings.queues.first, ignore_result=True)
