"""RabbitMQ counts a delivery for each lost connection, even if no worker tried the message; no trace may die of that."""

import json
import signal
from functools import partial

import pytest
from kombu import Connection
from kp_scorer.client import Client
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.arena import Arena, endure, put, submit, supervised, traces, wait_until_ended
from tests.support.crashing_worker import KILLS_READERS
from tests.support.processes import wait_until
from tests.support.rabbitmq import close_connections, declare_as_worker

LIMIT = 3
FEW = 20
MANY = 25


def dead_of(settings: Settings) -> list[str]:
    with Store.open(settings) as store:
        return [dead.detail for dead in store.dead_letters.read()]


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_no_trace_dies_of_connections_that_are_lost_while_redis_is_away(arena: Arena) -> None:
    settings = arena.settings(redis__url=arena.store_proxy.url, worker__max_attempts=LIMIT)
    with supervised(settings, arena.directory, 2) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        with Client(arena.settings()) as client:
            submitted = submit(client, traces(FEW))
        wait_until(lambda: fleet.logged("trace_waits"))
        for _ in range(LIMIT + 3):
            close_connections(settings)
            # In this time the workers would reconnect, and receive messages again that they cannot decide.
            endure(2.0)
        assert fleet.logged("connection_lost") >= 2
        arena.store_proxy.deliver()
        arena.finish(fleet, submitted)
    assert dead_of(arena.settings()) == []


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_traces_that_came_back_many_times_and_were_never_tried_are_decided(arena: Arena) -> None:
    settings = arena.settings(worker__max_attempts=LIMIT)
    declare_as_worker(settings)
    (unsubmitted,) = traces(1, "unsubmitted")
    with Client(settings) as client:
        submitted = submit(client, traces(FEW)[1:])
    put(settings, json.dumps(unsubmitted).encode())
    for _ in range(MANY):
        with Connection(settings.broker.url) as connection:
            for _ in range(FEW):
                wait_until(partial(connection.default_channel.basic_get, settings.queues.first))
    with supervised(settings, arena.directory, 1) as fleet:
        wait_until_ended(settings, [*submitted, str(unsubmitted["id"])])
        assert fleet.stop() == [0]
    assert dead_of(settings) == []
    with Store.open(settings) as store:
        (record,) = store.ledger.look_up([str(unsubmitted["id"])])
    assert record
    assert record.decision
    assert record.decision.received
    assert record.decision.received.deliveries == MANY + 1


@pytest.mark.slow
def test_a_message_that_kills_its_readers_becomes_a_dead_letter(arena: Arena) -> None:
    settings = arena.settings(worker__max_attempts=LIMIT)
    (deadly,) = traces(1, KILLS_READERS)
    declare_as_worker(settings)
    put(settings, json.dumps(deadly).encode())
    with supervised(settings, arena.directory, 1) as fleet:
        wait_until(lambda: dead_of(settings))
        assert set(fleet.ends) == {-signal.SIGKILL}
        # Two workers die before the message is suspected.
        assert len(fleet.ends) == LIMIT + 2
        with Client(settings) as client:
            wait_until_ended(settings, submit(client, traces(FEW)))
        assert fleet.stop() == [0]
    (detail,) = dead_of(settings)
    assert detail == f"{LIMIT} workers died or failed as they read it"
