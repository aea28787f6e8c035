"""While nobody reads a results queue, workers stop consuming and lose nothing; decisions for review have their own queue."""

from pathlib import Path

import pytest
import redis
from kp_scorer.broker.backlog import unread_decisions
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.builders import decision
from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.commands import command
from tests.support.outcomes import publish, published, read_until
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.traces import short_traces

LIMIT = 20
TRACES = 60
IN_FLIGHT = 8


@pytest.fixture
def limited(on_broker: SettingsWith) -> Settings:
    """Settings, on either broker, of a worker that accepts all traces and stops at a few unread decisions."""
    return on_broker(queues__results_limit=LIMIT, worker__concurrency=IN_FLIGHT, scoring__threshold=0.0)


def test_a_full_results_queue_stops_workers_which_drain_at_once_until_it_is_read(limited: Settings, tmp_path: Path) -> None:
    traces = {str(trace["id"]): trace for trace in short_traces(TRACES, seed=7)}
    with at_work(limited, tmp_path) as (worker, client):
        client.submit_many(traces.values())
        (line,) = wait_until(lambda: worker.events("results_full"))
        # Messages that had still found room were in flight while the worker looked.
        assert LIMIT <= line["unread"] <= LIMIT + IN_FLIGHT

        def decided() -> int:
            return sum(status is not None and status.state == "decided" for status in client.look_up(list(traces)))

        # Traces in flight are still decided and then wait for room, while no more are received.
        wait_until(lambda: decided() == len(worker.events("trace_decided")) + IN_FLIGHT)
        assert decided() <= LIMIT + 2 * IN_FLIGHT
        assert worker.events("message_requeued") == []
        worker.process.terminate()
        assert worker.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in worker.text()
    with at_work(limited, tmp_path) as (worker, _):
        wait_until(lambda: worker.events("results_full"))
        read_until(limited, traces)
        wait_until(lambda: worker.events("results_drained"))
        assert worker.process.poll() is None


def test_a_queue_that_is_full_by_its_bytes_is_shown_as_full(on_broker: SettingsWith, tmp_path: Path) -> None:
    # The limit of 50,000 bytes is reached at five or six decisions.
    settings = on_broker(
        results__with_trace=True, queues__results_limit=LIMIT, worker__concurrency=IN_FLIGHT, scoring__threshold=0.01
    )
    accepted = settings.queues.name("accepted")
    with at_work(settings, tmp_path) as (worker, client), make_celery(settings) as app, Store.open(settings) as store:
        client.submit_many([trace | {"padding": "x" * 5_000} for trace in short_traces(TRACES, seed=7)])
        wait_until(lambda: worker.events("results_full"))
        wait_until(lambda: unread_decisions(app, settings, store, store.worker_reports()).full == (accepted,))
        unread = unread_decisions(app, settings, store, ())
        # RabbitMQ does not say how many bytes a queue holds.
        assert unread.used(accepted) > 0.9 if settings.broker.is_redis else not unread.bytes
        status = command(with_changed(settings, embedding__embedder="none"), "doctor")
        assert (status.exit_code, "workers wait when it is full" in status.output) == (1, True)


def test_the_limit_that_is_reached_first_says_when_a_queue_is_full(settings: Settings, redis_client: redis.Redis) -> None:
    limited = with_changed(settings, results__with_trace=True, queues__results_limit=1_000)
    accepted = limited.queues.name("accepted")
    with make_celery(limited) as app, Store.open(limited) as store:
        redis_client.lpush(accepted, *["{}"] * 300)
        before = unread_decisions(app, limited, store, ())
        assert 0.2 < before.used(accepted) < 0.5
        redis_client.lpush(accepted, *["x" * 40_000] * 25)
        now = unread_decisions(app, limited, store, ())
        # At this rate, the bytes fill the queue in less than twice the time; the number would take twenty times as long.
        assert 0 < now.full_in_s(accepted, before) < 2 * (now.at_s - before.at_s)
        redis_client.lpush(accepted, *["x" * 40_000] * 40)
        assert unread_decisions(app, limited, store, ()).full == (accepted,), "nobody had to publish to it"


def test_a_queue_counts_as_full_only_while_something_waits_for_room(limited: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_celery(limited) as app, Store.open(limited) as store:
        publisher = Publisher(app, limited, store)
        accepted = decision("kp:trace:one", outcome="accepted")

        def refused() -> bool:
            return publisher.publish_all([publisher.publication(accepted, {}, None, set())]) != [None]

        wait_until(refused)
        assert publisher.full() == {limited.queues.name("accepted")}
        monkeypatch.setattr("kp_scorer.broker.results._REFUSED_WITHIN_S", 0.1)
        wait_until(lambda: not publisher.full())


def test_a_decision_for_review_is_published_even_if_settings_name_no_reviews(on_broker: SettingsWith) -> None:
    settings = on_broker()
    with make_celery(settings) as app, Store.open(settings) as store:
        publish(Publisher(app, settings, store), decision("kp:trace:close", outcome="review"))
    assert published(settings) == []
    assert [reviewed["trace_id"] for reviewed in published(settings, "review")] == ["kp:trace:close"]


def test_reading_decisions_consumes_no_tasks_of_another_app(settings: Settings, redis_client: redis.Redis) -> None:
    of_shop = with_changed(settings, results__via="task", results__task="shop.decided")
    tasks = settings.queues.name("accepted")
    redis_client.lpush(tasks, "a task of the shop")
    for outcome in (None, "rejected"):
        with pytest.raises(SettingsError, match="workers of its Celery app take them"):
            published(of_shop, outcome)
    assert redis_client.lrange(tasks, 0, -1) == [b"a task of the shop"]
