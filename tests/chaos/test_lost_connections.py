"""RabbitMQ counts a delivery for every connection that is lost, whether a worker tried the message or not."""

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
MOST_READERS = 3


def dead_of(settings: Settings) -> list[str]:
    with Store.open(settings) as store:
        return [dead.detail for dead in store.dead_letters.read()]


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_no_trace_dies_of_connections_that_are_lost_while_redis_is_away(arena: Arena) -> None:
    settings = arena.settings(redis__url=arena.store_proxy.url, broker__delivery_limit=LIMIT)
    with supervised(settings, arena.directory, 2) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        with Client(arena.settings(broker__delivery_limit=LIMIT)) as client:
            submitted = submit(client, traces(FEW))
        wait_until(lambda: fleet.logged("trace_waits"))
        for _ in range(LIMIT + 3):
            close_connections(settings)
            # Connected again, they would receive within a second what they cannot decide.
            endure(2.0)
        assert fleet.logged("connection_lost") >= 2
        arena.store_proxy.deliver()
        arena.finish(fleet, submitted)
    assert dead_of(arena.settings()) == []


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_what_was_delivered_too_often_and_never_tried_is_decided(arena: Arena) -> None:
    settings = arena.settings(broker__delivery_limit=LIMIT)
    declare_as_worker(settings)
    (unsubmitted,) = traces(1, "unsubmitted")
    with Client(settings) as client:
        submitted = submit(client, traces(FEW)[1:])
    put(settings, json.dumps(unsubmitted).encode())
    for _ in range(LIMIT):
        with Connection(settings.broker.url) as connection:
            for _ in range(FEW):
                wait_until(partial(connection.default_channel.basic_get, settings.queues.traces))
    wait_until(lambda: _dead_queue(settings) == FEW)
    with supervised(settings, arena.directory, 1) as fleet:
        wait_until_ended(settings, [*submitted, str(unsubmitted["id"])])
        assert fleet.stop() == [0]
    assert dead_of(settings) == []


@pytest.mark.slow
def test_a_message_that_kills_whoever_reads_it_becomes_a_dead_letter(arena: Arena) -> None:
    settings = arena.settings(broker__delivery_limit=LIMIT)
    (deadly,) = traces(1, KILLS_READERS)
    declare_as_worker(settings)
    put(settings, json.dumps(deadly).encode())
    with supervised(settings, arena.directory, 1) as fleet:
        wait_until(lambda: dead_of(settings))
        assert set(fleet.ends) == {-signal.SIGKILL}
        assert LIMIT <= len(fleet.ends) <= LIMIT + MOST_READERS
        with Client(settings) as client:
            wait_until_ended(settings, submit(client, traces(FEW)))
        assert fleet.stop() == [0]
    (detail,) = dead_of(settings)
    assert "no worker finished with it" in detail


def _dead_queue(settings: Settings) -> int:
    with Connection(settings.broker.url) as connection:
        return int(connection.default_channel.queue_declare(settings.queues.dead_name, passive=True).message_count)
