"""Messages that come more than once, too early, or to workers whose clocks are wrong."""

import random
from collections.abc import Mapping

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.client import Client

from tests.support.arena import SEED, TRACES, Arena, settle, submit, supervised, traces
from tests.support.crashing_worker import STALLS
from tests.support.processes import wait_until


@pytest.mark.slow
def test_same_trace_to_two_workers_at_once(arena: Arena) -> None:
    load = traces()
    settings = arena.settings()
    with make_celery(settings) as foreign:
        for trace in load:
            for _ in range(2):
                foreign.send_task(TASK_NAME, args=[trace], queue=settings.queues.traces)
    with supervised(settings, arena.directory, 2) as fleet:
        arena.finish(fleet, [str(trace["id"]) for trace in load])
        assert fleet.logged("trace_decided") == 2 * len(load)


@pytest.mark.slow
def test_broker_that_delivers_everything_twice(arena: Arena) -> None:
    chance, waiting, submitted = random.Random(SEED), traces(), list[str]()
    with (
        supervised(arena.settings(), arena.directory, 3, lambda place, life: {"DELIVERED_TWICE": "1"}) as fleet,
        Client(arena.settings()) as client,
    ):
        fleet.wait_until_ready()
        while waiting:
            submitted += submit(client, waiting[:100])
            del waiting[:100]
            list(client.as_settled(submitted[-100:], timeout_s=chance.uniform(0.05, 0.7)))
            fleet.kill(chance.randrange(3))
        arena.finish(fleet, submitted)
        assert fleet.logged("trace_decided") > 1.5 * len(submitted)


@pytest.mark.slow
def test_visibility_timeout_shorter_than_a_stalled_batch(arena: Arena) -> None:
    def stall(place: int, life: int) -> Mapping[str, str]:
        return {"STALL_S": "7" if place == 0 else "0"}

    load = [*traces(TRACES - 10), *traces(10, STALLS)]
    with supervised(arena.settings(), arena.directory, 2, stall) as fleet, Client(arena.settings()) as client:
        fleet.wait_until_ready()
        arena.finish(fleet, submit(client, load))
        assert fleet.ends == [], "a worker ended that was only slow"


@pytest.mark.slow
def test_stalled_worker_ends_and_another_decides(arena: Arena) -> None:
    def stall(place: int, life: int) -> Mapping[str, str]:
        return {"STALL_S": "600" if life == 0 else "0"}

    load = [*traces(10, STALLS), *traces(TRACES - 10)]
    settings = arena.settings(worker__decision_timeout_s=2.0)
    with supervised(settings, arena.directory, 1, stall) as fleet, Client(settings) as client:
        submitted = submit(client, load)
        wait_until(lambda: fleet.ends)
        arena.finish(fleet, submitted)
        assert fleet.logged("worker_stalled") == 1
        assert fleet.ends == [4]


@pytest.mark.slow
def test_clocks_that_are_an_hour_off(arena: Arena) -> None:
    def clock(place: int, life: int) -> Mapping[str, str]:
        return {"CLOCK_OFFSET_S": str((3_600, -3_600, 0)[place]), "EMBED_S": "0.1"}

    load = traces()
    half = TRACES // 2
    with Client(arena.settings()) as client, supervised(arena.settings(), arena.directory, 3, clock) as fleet:
        submitted = submit(client, load[:half])
        fleet.wait_until_ready()
        wait_until(lambda: fleet[0].events("trace_decided") and fleet[1].events("trace_decided"))
        # What they hold must come back as soon as from others, not in an hour.
        fleet.kill(0)
        fleet.kill(1)
        submitted += submit(client, load[half:])
        settle(arena.settings(), submitted)
        arena.finish(fleet, submitted)
        # Those that the two killed held may have been decided and not yet acknowledged.
        held = 2 * arena.settings().worker.concurrency
        assert fleet.logged("trace_decided") <= len(submitted) + held, "messages in good hands were given to others too"
