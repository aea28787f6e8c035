"""When nobody reads decisions, work stops being taken, nothing is lost, and it resumes by itself."""

from pathlib import Path
from typing import Any

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher, open_results
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings

from tests.support.outcomes import published
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples, short_traces

LIMIT = 20
TRACES = 60
IN_HAND = 8


@pytest.fixture(params=["redis", "rabbitmq"])
def limited(request: pytest.FixtureRequest, settings: Settings) -> Settings:
    """Settings of a worker that stops at a few unread decisions, all on one queue, on either broker."""
    if request.param == "redis":
        urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
        one_queue = {"queues.accepted": "decisions", "queues.rejected": "decisions"}
        return load_settings({**urls, **one_queue, "queues.results_limit": LIMIT, "worker.concurrency": IN_HAND})
    rabbitmq: RabbitMQ = request.getfixturevalue("rabbitmq")
    one = rabbitmq.name("rejected")
    return rabbitmq.settings(queues__results_limit=LIMIT, worker__concurrency=IN_HAND, queues__accepted=one)


def test_a_full_results_queue_stops_the_worker_until_it_is_read(limited: Settings, tmp_path: Path) -> None:
    traces = {str(trace["id"]): trace for trace in short_traces(TRACES, seed=7)}
    with start_worker(limited, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(limited) as client:
        for trace in traces.values():
            client.submit(trace)
        (line,) = wait_until(lambda: worker.events("results_full"))
        # Those that had found room were on their way while it looked.
        assert LIMIT <= line["unread"] <= LIMIT + IN_HAND

        def decided() -> int:
            return sum(status is not None and status.state == "decided" for status in client.look_up(list(traces)))

        # What is in hand is decided too, and waits for room; no more is taken.
        wait_until(lambda: decided() == len(worker.events("trace_decided")) + IN_HAND)
        assert decided() <= LIMIT + 2 * IN_HAND
        found: dict[str, dict[str, Any]] = {}

        def all_read() -> bool:
            found.update({decision["trace_id"]: decision for decision in published(limited)})
            return found.keys() == traces.keys()

        wait_until(all_read)
        assert worker.events("results_drained")
        assert worker.events("trace_given_back") == []
        assert worker.process.poll() is None


def test_a_worker_that_waits_for_room_ends_at_once_when_told_to(limited: Settings, tmp_path: Path) -> None:
    traces = {str(trace["id"]): trace for trace in short_traces(TRACES, seed=8)}
    with Client(limited) as client:
        for trace in traces.values():
            client.submit(trace)
    with start_worker(limited, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        wait_until(lambda: worker.events("results_full"))
        worker.process.terminate()
        assert worker.process.wait(20) == 0
    found = {decision["trace_id"] for decision in published(limited)}
    assert len(found) < TRACES
    with start_worker(limited, tmp_path / "next.log", command=FAST_WORKER):

        def all_read() -> bool:
            found.update(decision["trace_id"] for decision in published(limited))
            return found == traces.keys()

        wait_until(all_read)


def test_publishing_to_a_full_queue_fails_until_one_is_read(limited: Settings, tmp_path: Path) -> None:
    (trace,) = fresh_samples(1)
    with start_worker(limited, tmp_path / "worker.log", command=FAST_WORKER), Client(limited) as client:
        decision = client.wait(client.submit(trace), timeout_s=60)
    app = make_celery(limited)
    publisher = Publisher(app, limited)
    # The worker's own decision is there already.
    for _ in range(LIMIT - 1):
        publisher.publish(decision)
    with pytest.raises(ServiceUnavailable, match="full"):
        publisher.publish(decision)
    _take_one(limited, decision)
    wait_until(lambda: _goes_out(publisher, decision))
    app.close()


def _take_one(settings: Settings, decision: Decision) -> None:
    app = make_celery(settings)
    with open_results(app, settings, decision.outcome) as results:
        next(results.take()).acknowledge()
    app.close()


def _goes_out(publisher: Publisher, decision: Decision) -> bool:
    try:
        publisher.publish(decision)
    except ServiceUnavailable:
        return False
    return True
