"""A worker that dies at any one step between taking a message and acknowledging it loses nothing and decides nothing twice."""

import random
from collections.abc import Mapping
from itertools import count
from typing import Final

import pytest
from kp_scorer.client import Client

from tests.support.arena import SEED, SETTLE_S, Arena, submit, supervised, traces
from tests.support.processes import wait_until
from tests.support.traces import short_traces

POINTS: Final = ("taken", "embedding", "placed", "committed", "published")
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
            # Always some work, until the last has died at it: workers that are let live may have taken all that there was.
            chunk = [waiting.pop() for _ in range(min(20, len(waiting)))] or short_traces(5, seed=next(rounds))
            submitted.extend(submit(client, chunk))
            list(client.as_settled(submitted[-20:], timeout_s=0.3))
            return len(fleet.ends) >= planned

        wait_until(all_died, SETTLE_S)
        submitted += submit(client, waiting)
        arena.finish(fleet, submitted)
        assert fleet.ends == [-9] * planned


@pytest.mark.slow
def test_a_worker_that_dies_when_a_letter_is_kept_leaves_no_second_one(arena: Arena) -> None:
    # What clients with other limits let through is read, and buried, anew by the worker that is next.
    strict = arena.settings(limits__steps=1)
    with (
        supervised(strict, arena.directory, 1, lambda place, life: {} if life else {"CRASH_AT": "buried"}) as fleet,
        Client(arena.settings()) as client,
    ):
        *refused, taken = traces(6)
        dead = submit(client, refused)
        wait_until(lambda: fleet.ends == [-9], SETTLE_S)
        arena.finish(fleet, [*dead, *submit(client, [taken | {"steps": taken["steps"][:1]}])], dead)
