"""A neighbour that takes one of our names in Redis for something else: nothing is lost, and the log says which name it is."""

from pathlib import Path
from typing import Any

import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Counts, Store
from kp_scorer.store.keys import Keys

from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.traces import short_traces


def test_names_that_a_neighbour_has_taken(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # What was moved and not noted comes back as if its worker had died.
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    settings = load_settings({**urls, "broker.visibility_timeout_s": 3})
    queue = settings.queues.traces
    names = [f"{queue}.in_hand", f"{queue}.index", keys.pending, keys.counts, keys.tallies, keys.letter_sizes]
    traces = short_traces(len(names), seed=20)
    with (
        make_celery(settings) as foreign,
        Client(settings) as client,
        start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
    ):
        for number, (name, trace) in enumerate(zip(names, traces, strict=True)):
            kept = redis_client.dump(name)
            redis_client.delete(name)
            redis_client.set(name, "a neighbour's")
            foreign.send_task(TASK_NAME, args=[trace], queue=queue, ignore_result=True)
            redis_client.lpush(queue, f"no message {number}")
            wait_until(lambda name=name: f"WRONGTYPE {name}" in worker.text())  # type: ignore[misc]
            redis_client.delete(name)
            if kept:
                redis_client.restore(name, 0, kept)
            assert client.wait(trace["id"], timeout_s=30)
            wait_until(lambda number=number: len(list(store.dead_letters.read())) == number + 1)  # type: ignore[misc]
            counts = store.ledger.counts()
            assert (counts.submitted, counts.pending) == (counts.decided + counts.dead, 0), name
            assert counts.submitted == 2 * (number + 1), name


def test_what_waits_in_hand_for_a_name_to_be_free_is_not_lost(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    settings = load_settings({**urls, "ledger.resend_after_s": 3, "ledger.max_resends": 0})
    (trace,) = short_traces(1, seed=21)

    def empty_since_ms() -> int:
        found: Any = redis_client.get(keys.drained)
        return int(found or 0)

    with (
        Client(settings) as client,
        start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
    ):
        # Where the log is, so that a trace can be begun, and neither placed nor decided.
        client.wait(client.submit(short_traces(1, seed=22)[0]), timeout_s=30)
        (log,) = redis_client.keys("*log:word-hash-1")
        redis_client.rename(log, "kept")
        redis_client.set(log, "a neighbour's")
        client.submit(trace)
        wait_until(lambda: worker.events("trace_waits"))
        # By now a message that is nowhere would count as lost twice over.
        due_ms = wait_until(empty_since_ms) + 7_000
        wait_until(lambda: empty_since_ms() > due_ms)
        assert list(store.dead_letters.read()) == []
        redis_client.rename("kept", log)
        assert client.wait(trace["id"], timeout_s=30)
    assert store.ledger.counts() == Counts(submitted=2, pending=0, decided=2, dead=0)
