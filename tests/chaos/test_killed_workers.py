"""Workers that die at any moment change no score, decide nothing twice and lose nothing."""

import json
import random
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from typing import Final

import pytest
from kp_scorer.client import Client
from kp_scorer.store import Store

from tests.support.arena import ENDED_WITHIN_S, SEED, TRACES, Arena, put, submit, supervised, traces, wait_until_ended
from tests.support.late_outcomes import LateOutcomes
from tests.support.outcomes import only_log
from tests.support.processes import wait_until
from tests.support.traces import short_traces

pytestmark = pytest.mark.slow

CHUNK = 50


@pytest.mark.parametrize(
    ("broker", "variables", "changed"),
    [
        ("redis", {}, {"novelty__against": "succeeded"}),
        ("redis", {"DELIVERED_TWICE": "1"}, {"routing__gate": "coverage"}),
        ("rabbitmq", {"DELIVERED_TWICE": "1"}, {}),
    ],
    ids=["compared with successes", "with a gate, delivered twice by Redis", "delivered twice by RabbitMQ"],
    indirect=["broker"],
)
def test_kills_at_random_moments(arena: Arena, variables: Mapping[str, str], changed: Mapping[str, object]) -> None:
    settings = arena.settings(**changed)
    chance = random.Random(SEED)
    waiting, submitted = traces(), list[str]()
    late = LateOutcomes(waiting, TRACES // 3, chance)
    with (
        supervised(settings, arena.directory, 3, lambda place, life: variables) as fleet,
        Client(settings) as client,
        Store.open(settings) as store,
    ):
        fleet.wait_until_ready()
        while waiting:
            put(settings, *late.due(len(submitted) + CHUNK))
            submitted += submit(client, waiting[:CHUNK])
            del waiting[:CHUNK]
            # The random wait lets the kill find batches at any stage.
            list(client.as_completed(submitted[-CHUNK:], timeout_s=chance.uniform(0.05, 0.7)))
            fleet.kill(chance.randrange(3))
        put(settings, *late.due(2 * TRACES))
        wait_until_ended(settings, late.trace_ids)
        arena.finish(fleet, submitted, revised=late.trace_ids)
        assert set(fleet.ends) == {-9}
        assert {entry.is_comparable for entry in only_log(store).entries()} == (
            {True, False} if "novelty__against" in changed else {True}
        )
        assert not variables or fleet.logged("trace_decided") > 1.5 * len(submitted)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_workers_killed_before_they_see_the_message_that_redis_gave_them(arena: Arena) -> None:
    waiting, submitted, kills, lost_replies = traces(), list[str](), 0, 0
    queue = arena.settings().queues.first
    with (
        supervised(arena.settings_behind_proxies(), arena.directory, 2) as fleet,
        Client(arena.settings()) as client,
        arena.redis.connect() as redis_client,
    ):
        while waiting:
            # Both workers block in Redis for the next message; hold back the replies, so that they are lost with the workers.
            wait_until(lambda: int(redis_client.info("clients")["blocked_clients"]) >= 2)
            arena.broker_proxy.hold_replies()
            chunk, waiting = waiting[:100], waiting[100:]
            submitted += submit(client, chunk)
            # If the workers have just stopped waiting, Redis gives them no message, and this round loses none.
            with suppress(AssertionError):
                wait_until(lambda chunk=chunk: int(redis_client.llen(queue)) < len(chunk), timeout_s=5)  # type: ignore[misc]
                lost_replies += 1
            fleet.kill(0)
            fleet.kill(1)
            kills += 2
            arena.broker_proxy.deliver()
        arena.finish(fleet, submitted)
        assert len(fleet.ends) >= kills
        assert lost_replies, "no worker was killed between the two"


POINTS: Final = ("received", "embedding", "placed", "committed", "published")
WORKERS: Final = 2
DEADLY_LIVES: Final = 5


def crash_plan(place: int, life: int) -> Mapping[str, str]:
    """Have each worker die once at every point, one per life, in a random order; its later lives survive."""
    if life >= DEADLY_LIVES:
        return {}
    points = random.Random(f"{SEED}:{place}").sample(POINTS, len(POINTS))
    return {"CRASH_AT": points[life], "CRASH_AFTER": str(random.Random(f"{SEED}:{place}:{life}").randint(1, 6))}


def test_workers_that_die_at_every_step(arena: Arena) -> None:
    waiting, submitted, rounds = traces(), list[str](), count(SEED + 1)
    planned = WORKERS * DEADLY_LIVES
    with supervised(arena.settings(), arena.directory, WORKERS, crash_plan) as fleet, Client(arena.settings()) as client:

        def all_died() -> bool:
            # Submit more until the last planned death: otherwise the survivors might decide everything before it.
            chunk = [waiting.pop() for _ in range(min(20, len(waiting)))] or short_traces(5, seed=next(rounds))
            submitted.extend(submit(client, chunk))
            list(client.as_completed(submitted[-20:], timeout_s=0.3))
            return len(fleet.ends) >= planned

        wait_until(all_died, ENDED_WITHIN_S)
        submitted += submit(client, waiting)
        arena.finish(fleet, submitted)
        assert fleet.ends == [-9] * planned


def test_a_worker_killed_after_it_stored_a_dead_letter_leaves_exactly_one(arena: Arena) -> None:
    # The worker's limit is below the client's, so it dead-letters these messages, and so does the worker that replaces it.
    *some, allowed = traces(6)
    refused = [trace | {"steps": trace["steps"] * 20} for trace in some]
    strict = arena.settings(queues__message_bytes=len(json.dumps(allowed)))
    with (
        supervised(strict, arena.directory, 1, lambda place, life: {} if life else {"CRASH_AT": "dead"}) as fleet,
        Client(arena.settings()) as client,
    ):
        dead = submit(client, refused)
        wait_until(lambda: fleet.ends == [-9], ENDED_WITHIN_S)
        arena.finish(fleet, [*dead, *submit(client, [allowed])], dead)
