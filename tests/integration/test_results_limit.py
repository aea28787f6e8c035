"""When nobody reads decisions, work stops being taken, nothing is lost, and it resumes by itself."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import MessageNacked
from kp_scorer import score_traces
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher, open_results
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, WhenFull, as_environment, load_settings
from kp_scorer.store import Store
from structlog.testing import capture_logs

from tests.support.builders import decision_on
from tests.support.commands import run
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
        assert worker.events("message_given_back") == []
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
        assert "Traceback" not in worker.text()
    found = {decision["trace_id"] for decision in published(limited)}
    assert len(found) < TRACES
    with start_worker(limited, tmp_path / "next.log", command=FAST_WORKER):

        def all_read() -> bool:
            found.update(decision["trace_id"] for decision in published(limited))
            return found == traces.keys()

        wait_until(all_read)


def test_publishing_to_a_full_queue_fails_until_one_is_read(limited: Settings, store: Store) -> None:
    decision = decision_on_a_sample()
    app = make_celery(limited)
    publisher = Publisher(app, limited, store)
    for _ in range(LIMIT):
        publisher.publish(decision)
    with pytest.raises(ServiceUnavailable, match="full"):
        publisher.publish(decision)
    _take_one(limited, decision)
    wait_until(lambda: _goes_out(publisher, decision))
    app.close()


def test_the_oldest_make_room_where_the_settings_say_so(limited: Settings, store: Store) -> None:
    settings = with_policy(limited, "drop_oldest")
    decisions = [decision_on_a_sample() for _ in range(LIMIT + 5)]
    with make_celery(settings) as app, capture_logs() as lines:
        publisher = Publisher(app, settings, store)
        for decision in decisions:
            publisher.publish(decision)
    assert [found["trace_id"] for found in published(settings)] == [decision.trace_id for decision in decisions[5:]]
    assert store.drops.counts() == {settings.queues.rejected: 5}
    told = [(line["queue"], line["count"]) for line in lines if line["event"] == "results_dropped"]
    # The others come with the next line, a second later at the soonest.
    assert told == [(settings.queues.rejected, 1)]


def test_a_queue_that_others_have_filled_makes_room_too(limited: Settings, store: Store) -> None:
    settings = with_policy(limited, "drop_oldest")
    one, other = decision_on_a_sample(), decision_on_a_sample()
    with make_celery(settings) as app:
        publisher = Publisher(app, settings, store)
        publisher.publish(one)
        # This publisher has just seen room for many more.
        _fill(settings)
        publisher.publish(other)
    found = [decision["trace_id"] for decision in published(settings)]
    assert found[-1] == other.trace_id
    assert store.drops.counts().get(settings.queues.rejected, 0) + len(found) >= LIMIT


def test_a_worker_goes_on_where_the_oldest_make_room(limited: Settings, store: Store, tmp_path: Path) -> None:
    settings = with_policy(limited, "drop_oldest")
    traces = short_traces(TRACES, seed=9)
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        for trace in traces:
            client.submit(trace)
        wait_until(lambda: store.ledger.counts().decided == TRACES)
        wait_until(lambda: len(worker.events("trace_decided")) == TRACES)
        assert worker.events("results_dropped")
        assert worker.events("trace_waits") == []
    left = len(published(settings))
    assert left <= LIMIT + IN_HAND
    assert left + store.drops.counts()[settings.queues.rejected] == TRACES


def test_what_is_not_to_be_published_is_not(limited: Settings, store: Store, tmp_path: Path) -> None:
    settings = with_policy(limited, "none")
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        for trace in short_traces(LIMIT + 1, seed=10):
            client.submit(trace)
        wait_until(lambda: len(worker.events("trace_decided")) == LIMIT + 1)
    assert published(settings) == []
    assert store.drops.counts() == {}


def test_the_command_line_says_what_is_full_and_what_to_do(limited: Settings, tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text("\n".join(map(json.dumps, short_traces(TRACES, seed=11))))
    with start_worker(limited, tmp_path / "worker.log", command=FAST_WORKER):
        waited = kp_scorer(limited, "submit", str(file), "--wait", "--timeout", "8")
        # Decided, and not published, what is in hand counts as pending no more.
        stats = json.loads(kp_scorer(limited, "stats").stdout)
    name = limited.queues.rejected
    told = [line for line in waited.stderr.splitlines() if "full" in line]
    assert told == [
        f"the queue {name} is full of unread decisions, so the workers wait: read it with `kp-scorer decisions`, "
        f"or set {_policies(limited)}"
    ]
    assert (stats["full"], stats["dropped"]) == ([name], {})
    assert stats["waiting"][name] >= LIMIT


def _policies(settings: Settings) -> str:
    both = settings.queues.accepted == settings.queues.rejected
    return "queues.accepted_when_full and queues.rejected_when_full" if both else "queues.rejected_when_full"


def kp_scorer(settings: Settings, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run(*arguments, **as_environment(settings))


def with_policy(settings: Settings, policy: WhenFull) -> Settings:
    changed = {"accepted_when_full": policy, "rejected_when_full": policy}
    return settings.model_copy(update={"queues": settings.queues.model_copy(update=changed)})


def decision_on_a_sample() -> Decision:
    """A decision of its own trace."""
    (trace,) = fresh_samples(1)
    (decision,) = score_traces([trace], load_settings({"embedding.embedder": "none"}))
    return decision


def _fill(settings: Settings) -> None:
    """Publish until the queue is full, or over full where nothing but manners keeps it from that."""
    with make_celery(settings) as app, app.connection_for_write() as connection, connection.channel() as channel:
        producer = connection.Producer(channel)
        for _ in range(LIMIT + 5):
            with suppress(MessageNacked):
                producer.publish(
                    json.loads(decision_on("kp:trace:another")),
                    exchange="",
                    routing_key=settings.queues.rejected,
                    serializer="json",
                )


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
