"""Messages that break the workers that read them do no harm to the innocent ones among them."""

from collections import Counter
from typing import Final

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.store import Store

from tests.support.arena import TRACES, Arena, put, submit, supervised, traces
from tests.support.crashing_worker import BREAKS, KILLS, PANICS
from tests.support.rabbitmq import LARGEST_BYTES

FEW: Final = 20
UNREADABLE: Final = {
    "not JSON": b"hello",
    "wrong encoding": '[["caf\u00e9"], {}, {}]'.encode("utf-16"),
    "no task": b"[]",
    "a call of nothing": b'{"args": 1}',
    "deep nesting": b"[" * 100_000 + b"]" * 100_000,
}


@pytest.mark.slow
def test_poison_among_innocent_traces(arena: Arena) -> None:
    settings = arena.settings(worker__max_attempts=2)
    breaking, killing, innocent = traces(3, BREAKS), traces(2, KILLS), traces(TRACES)
    load = [*innocent[:100], *breaking[:2], *killing[:1], *innocent[100:300], *breaking[2:], *killing[1:], *innocent[300:]]
    # For a message too large to be read, the dead letter has only the beginning; on Redis, the whole is set aside.
    huge = b"\0" * (20_000_000 if arena.broker == "redis" else LARGEST_BYTES)
    unreadable = [*UNREADABLE.values(), huge]
    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        # On RabbitMQ the workers declare the queue: messages published before that are lost.
        fleet.wait_until_ready()
        put(settings, UNREADABLE["not JSON"])
        submitted = submit(client, load)
        put(settings, *unreadable)
        # This message is good, although it names another app's task.
        with make_celery(settings) as foreign:
            foreign.send_task("somebody.elses", args=traces(1), queue=settings.queues.first, ignore_result=True)
        arena.finish(fleet, submitted, dead=[str(trace["id"]) for trace in (*breaking, *killing)])
        assert set(fleet.ends) == {-9}
        assert len(fleet.ends) >= settings.worker.max_attempts
    with Store.open(settings) as store, arena.redis.connect() as redis_client:
        dead_letters = list(store.dead_letters.read())
        malformed = Counter(store.dead_letters.payload(dead.letter_id) for dead in dead_letters if dead.reason == "malformed")
        aside = set(redis_client.lrange(f"{settings.queues.first}.oversized", 0, -1))
    reasons = {dead.trace_id: dead.reason for dead in dead_letters if dead.trace_id}
    assert {reasons[str(trace["id"])] for trace in breaking} == {"scoring_failed"}
    assert {reasons[str(trace["id"])] for trace in killing} == {"poison"}
    assert aside == ({huge} if arena.broker == "redis" else set())
    expected = {body[:65_536] if body == huge else body for body in unreadable}
    assert {body: malformed[body] for body in expected} == dict.fromkeys(expected, 1)
    assert len(malformed) == len(unreadable) + 1


@pytest.mark.slow
def test_traces_that_fail_each_reader_twice_are_decided(arena: Arena) -> None:
    settings = arena.settings()
    panicking = traces(2, PANICS)
    with supervised(settings, arena.directory, 2) as fleet, Client(settings) as client:
        arena.finish(fleet, submit(client, [*panicking, *traces(FEW)]))
        assert fleet.ends == []
        assert fleet.logged("message_requeued") >= 2 * len(panicking)
