"""No decision is lost if nobody reads the results queues, or if somebody deletes them."""

from typing import Any

import pytest
from kombu import Connection
from kp_scorer.client import Client

from tests.support.arena import TRACES, Arena, decided_of, submit, supervised, traces, wait_until_ended
from tests.support.outcomes import published
from tests.support.processes import wait_until

HALF = TRACES // 2


@pytest.mark.slow
def test_unread_results_of_one_outcome_stop_workers_and_lose_nothing(arena: Arena) -> None:
    # The others go to review, because the queue of rejected decisions drops its oldest and never fills up.
    settings = arena.settings(queues__results_limit=TRACES // 10, scoring__threshold=0.45, scoring__review=0.01)
    read_decisions: list[dict[str, Any]] = []

    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        submitted = submit(client, traces())

        def is_stalled() -> bool:
            # A reader of accepted decisions reads only those.
            read_decisions.extend(published(settings, "accepted"))
            full = [{line["queue"] for line in worker.events("results_full")} for worker in fleet]
            return all(settings.queues.name("review") in queues for queues in full)

        def are_all_read() -> bool:
            read_decisions.extend(published(settings))
            return len({decision["trace_id"] for decision in read_decisions}) == TRACES

        wait_until(is_stalled)
        fleet.kill(0)
        fleet.wait_until_ready()
        read_decisions += published(settings, "accepted")
        assert {decision["outcome"] for decision in read_decisions} == {"accepted"}
        assert len(decided_of(client, submitted)) < TRACES

        wait_until(are_all_read)
        arena.finish(fleet, submitted, consumed=read_decisions)
        assert fleet.ends == [-9]


@pytest.mark.slow
def test_results_queues_deleted_in_mid_load(arena: Arena) -> None:
    settings = arena.settings()
    load = traces()
    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        submitted = submit(client, load[:HALF])
        wait_until_ended(settings, submitted)
        wait_until(arena.is_idle)
        read_decisions = published(settings)
        with Connection(settings.broker.url) as connection, connection.channel() as channel:
            for queue in (settings.queues.name("accepted"), settings.queues.name("rejected")):
                channel.queue_delete(queue)
        submitted += submit(client, load[HALF:])
        arena.finish(fleet, submitted, consumed=read_decisions)
        assert fleet.ends == []
