"""Workers that are killed without warning change no score, decide nothing twice and lose nothing."""

import random

import pytest
import redis

from tests.chaos.arena import SEED, Arena, submit, traces
from tests.chaos.fleet import Fleet
from tests.processes import wait_until
from worker.client import Client

CHUNK = 50


@pytest.mark.slow
def test_kills_at_random_moments(arena: Arena) -> None:
    chance = random.Random(SEED)
    waiting, submitted = traces(), list[str]()
    with Fleet(arena.settings(), arena.directory, 3) as fleet, Client(arena.settings()) as client:
        fleet.wait_until_ready()
        while waiting:
            submitted += submit(client, waiting[:CHUNK])
            del waiting[:CHUNK]
            # Enough for the batches in hand to be at any stage.
            list(client.as_settled(submitted[-CHUNK:], timeout_s=chance.uniform(0.05, 0.7)))
            fleet.kill(chance.randrange(3))
        arena.finish(fleet, submitted)
        assert set(fleet.ends) == {-9}


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_workers_killed_before_they_see_the_message_that_redis_gave_them(arena: Arena) -> None:
    waiting, submitted = traces(), list[str]()
    queue = arena.settings().queues.traces
    with (
        Fleet(arena.settings_behind_proxies(), arena.directory, 2) as fleet,
        Client(arena.settings()) as client,
        arena.redis.connect() as store,
    ):
        while waiting:
            # Both wait for the next message in Redis, which answers into the void.
            wait_until(lambda: _blocked(store) >= 2)
            arena.broker_proxy.hold_replies()
            submitted += submit(client, waiting[:100])
            del waiting[:100]
            wait_until(lambda: store.llen(queue) <= 98)
            fleet.kill(0)
            fleet.kill(1)
            arena.broker_proxy.deliver()
        arena.finish(fleet, submitted)
        assert len(fleet.ends) >= 10


def _blocked(store: redis.Redis) -> int:
    return int(store.info("clients")["blocked_clients"])
