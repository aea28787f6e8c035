"""A worker that dies at any step between receiving and acknowledging a message loses nothing and decides nothing twice."""

import random
from collections.abc import Mapping
from itertools import count
from typing import Final

import pytest
from kp_scorer.client import Client

from tests.support.arena import ENDED_WITHIN_S, SEED, Arena, submit, supervised, traces
from tests.support.processes import wait_until
from tests.support.traces import short_traces

POINTS: Final = ("received", "embedding", "placed", "committed", "published")
WORKERS: Final = 2
DEADLY_LIVES: Final = 5


def crash_plan(place: int, life: int) -> Mapping[str, str]:
    """Each place meets each point in its first lives, in an order of its own; later lives are let live."""
    if life >= DEADLY_LIVES:
        return {}
    points = random.Random(f"{SEED}:{place}").sample(POINTS, len(POINTS))
    return {"CRASH_AT": points[life], "CRASH_AFTER": str(random.Random(f"{SEED}:{place}:{life}").randint(1, 6))}


@pytest.mark.slow
def test_workers_that_die_at_every_step(arena: Arena) -> None:
    waiting, submitted, rounds = traces(), list[str](), count(SEED + 1)
    planned = WORKERS * DEADLY_LIVES
    with supervised(arena.settings(), arena.directory, WORKERS, crash_plan) as fleet, Client(arena.settings()) as client:

        def all_died() -> bool:
            # Always some work, until the last has died at it: workers that are let live may have decided all that there was.
            chunk = [waiting.pop() for _ in range(min(20, len(waiting)))] or short_traces(5, seed=next(rounds))
            submitted.extend(submit(client, chunk))
            list(client.as_completed(submitted[-20:], timeout_s=0.3))
            return len(fleet.ends) >= planned

        wait_until(all_died, ENDED_WITHIN_S)
        submitted += submit(client, waiting)
        arena.finish(fleet, submitted)
        assert fleet.ends == [-9] * planned


@pytest.mark.slow
def test_a_worker_killed_after_it_stored_a_dead_letter_leaves_exactly_one(arena: Arena) -> None:
    # What clients with other limits let through is dead-lettered anew by the next worker.
    strict = arena.settings(limits__steps=1)
    with (
        supervised(strict, arena.directory, 1, lambda place, life: {} if life else {"CRASH_AT": "dead"}) as fleet,
        Client(arena.settings()) as client,
    ):
        *refused, short = traces(6)
        dead = submit(client, refused)
        wait_until(lambda: fleet.ends == [-9], ENDED_WITHIN_S)
        arena.finish(fleet, [*dead, *submit(client, [short | {"steps": short["steps"][:1]}])], dead)
