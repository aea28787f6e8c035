"""If the clock of Redis goes back, as after a failover, nothing waits until it has caught up."""

import time
from typing import Any

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.redis_transport.queue import QueueKeys
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Identity, Submission
from kp_scorer.store.runs import ReceivedSpan

from tests.support.changed_settings import with_changed
from tests.support.processes import wait_until
from tests.support.servers import redis_servers

AN_HOUR_MS = 3_600_000
A_DAY_MS = 24 * AN_HOUR_MS

# Our scripts treat times alike on every server, so one server is enough.
pytestmark = pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)


def test_messages_of_a_dead_consumer_are_reclaimed(settings: Settings, redis_client: redis.Redis) -> None:
    queue = QueueKeys(settings.queues.first)
    redis_client.lpush(queue.queue, "{}")
    with make_celery(with_changed(settings, broker__visibility_timeout_s=3)) as app, app.connection_for_read() as dead:
        assert dead.default_channel.basic_get(queue.queue)
        receipts: Any = redis_client.zrange(queue.renewed, 0, -1)
        redis_client.zincrby(queue.renewed, AN_HOUR_MS, receipts[0])
        with app.connection_for_read() as living:

            def is_back() -> bool:
                living.default_channel.reclaim(queue.queue)
                return bool(redis_client.llen(queue.queue))

            wait_until(is_back)


def test_lost_traces_are_sent_again(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    store.ledger.submit([Submission("kp:trace:lost", bytes(16), b"{}")])
    redis_client.zincrby(keys.pending, AN_HOUR_MS, "kp:trace:lost")

    def claimed() -> list[str]:
        return [claim.trace_id for claim in store.ledger.claim_lost(1, empty_ms_ago=0)]

    assert wait_until(claimed) == ["kp:trace:lost"]


def test_traces_lost_with_a_worker_that_leased_them_while_the_clock_was_ahead_are_sent_again(
    store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    store.ledger.submit([Submission("kp:trace:lost", bytes(16), b"{}")])
    store.ledger.acquire([Identity("kp:trace:lost", bytes(16))], alone=False)
    redis_client.hincrby(keys.record("kp:trace:lost"), "held_until_ms", A_DAY_MS)
    assert wait_until(lambda: store.ledger.claim_lost(1, empty_ms_ago=0))


def test_waiting_traces_are_not_sent_again_though_their_queue_was_empty_by_a_clock_that_was_ahead(
    store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    store.ledger.claim_lost(1, empty_ms_ago=0)
    redis_client.incrby(keys.drained, A_DAY_MS)
    store.ledger.submit([Submission("kp:trace:waiting", bytes(16), b"{}")])
    redis_client.zincrby(keys.pending, -AN_HOUR_MS, "kp:trace:waiting")
    assert store.ledger.claim_lost(1, empty_ms_ago=-1) == []


def test_a_run_that_began_to_wait_for_its_outcome_while_the_clock_was_ahead_is_closed_in_time(
    settings: Settings, keys: Keys, redis_client: redis.Redis
) -> None:
    waiting = with_changed(settings, serve__quiet_s=0.05, serve__outcome_wait_s=0.2)
    with Store.open(waiting) as collecting:
        collecting.runs.store("r", [ReceivedSpan("f" * 16, b"{}")])
        claimed = wait_until(collecting.runs.claim)
        assert claimed
        assert not collecting.runs.close(claimed, "", "")
        redis_client.hincrby(keys.run("r"), ":until_ms", A_DAY_MS)
        redis_client.zincrby(keys.runs, A_DAY_MS, "r")

        def is_closed() -> bool:
            run = collecting.runs.claim()
            return bool(run and collecting.runs.close(run, "", ""))

        wait_until(is_closed)


def test_runs_that_came_while_the_clock_was_ahead_are_claimed(
    settings: Settings, keys: Keys, redis_client: redis.Redis
) -> None:
    with Store.open(with_changed(settings, serve__quiet_s=0.05)) as collecting:
        collecting.runs.store("r", [ReceivedSpan("f" * 16, b"{}")])
        redis_client.zincrby(keys.runs, A_DAY_MS, "r")
        claimed = wait_until(collecting.runs.claim)
        assert claimed
        assert claimed.run_id == "r"


def test_a_run_whose_clock_was_ahead_ends_a_day_after_its_first_span(
    settings: Settings, keys: Keys, redis_client: redis.Redis
) -> None:
    with Store.open(with_changed(settings, serve__quiet_s=1e6)) as collecting:
        collecting.runs.store("r", [ReceivedSpan("f" * 16, b"{}")])
        redis_client.hincrby(keys.run("r"), ":first_ms", 30 * A_DAY_MS)
        collecting.runs.store("r", [ReceivedSpan("e" * 16, b"{}")])
        due_ms: Any = redis_client.zscore(keys.runs, "r")
        assert due_ms <= time.time() * 1_000 + A_DAY_MS + 1_000
