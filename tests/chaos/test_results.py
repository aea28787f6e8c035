"""Results queues that nobody reads, or that somebody has deleted."""

from typing import Any

import pytest
from kombu import Connection
from kp_scorer.client import Client
from kp_scorer.decision import Outcome

from tests.support.arena import TRACES, Arena, decided_of, settle, submit, supervised, traces
from tests.support.outcomes import published
from tests.support.processes import wait_until

HALF = TRACES // 2


@pytest.mark.slow
def test_results_that_nobody_reads(arena: Arena) -> None:
    limit = TRACES // 5
    settings = arena.settings(queues__results_limit=limit)
    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        submitted = submit(client, traces())
        wait_until(lambda: fleet.logged("results_full") and len(decided_of(client, submitted)) >= limit)
        # Each worker finishes what it has in hand, and takes no more.
        assert not arena.is_idle()
        assert len(decided_of(client, submitted)) < TRACES
        taken = published(settings)
        assert len(taken) >= limit

        def all_taken() -> bool:
            taken.extend(published(settings))
            return len({decision["trace_id"] for decision in taken}) == TRACES

        wait_until(all_taken)
        arena.finish(fleet, submitted, taken=taken)
        assert fleet.ends == []


@pytest.mark.slow
def test_results_of_one_outcome_that_nobody_reads(arena: Arena) -> None:
    settings = arena.settings(queues__results_limit=TRACES // 10, scoring__threshold=0.45)
    taken: list[dict[str, Any]] = []

    def read(outcome: Outcome | None = None) -> None:
        taken.extend(published(settings, outcome))

    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        submitted = submit(client, traces())

        def stands_still() -> bool:
            # Whoever cares for what is accepted reads that, and nothing else.
            read("accepted")
            full = [{line["queue"] for line in worker.events("results_full")} for worker in fleet]
            return all(settings.queues.rejected in queues for queues in full)

        wait_until(stands_still)
        fleet.kill(0)
        fleet.wait_until_ready()
        read("accepted")
        assert {decision["outcome"] for decision in taken} == {"accepted"}
        assert len(decided_of(client, submitted)) < TRACES

        def all_taken() -> bool:
            read()
            return len({decision["trace_id"] for decision in taken}) == TRACES

        wait_until(all_taken)
        arena.finish(fleet, submitted, taken=taken)
        assert fleet.ends == [-9]


@pytest.mark.slow
def test_results_queues_deleted_in_mid_load(arena: Arena) -> None:
    settings = arena.settings()
    load = traces()
    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        submitted = submit(client, load[:HALF])
        settle(settings, submitted)
        wait_until(arena.is_idle)
        taken = published(settings)
        with Connection(settings.broker.url) as connection, connection.channel() as channel:
            for queue in (settings.queues.accepted, settings.queues.rejected):
                channel.queue_delete(queue)
        submitted += submit(client, load[HALF:])
        arena.finish(fleet, submitted, taken=taken)
        assert fleet.ends == []
