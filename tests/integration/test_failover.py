"""A Redis that hands over to its replica: connections that still lead to the old one, now a replica, are left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.task_message import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer
from tests.support.traces import short_traces

SLOW = {"EMBED_S": "0.1"}
"""A batch takes a tenth of a second to embed."""


class Pair:
    """A primary and its replica, behind an address that leads to whichever is the primary when one connects."""

    def __init__(self, primary: RedisServer, replica: RedisServer, proxy: Proxy) -> None:
        self._primary = primary
        self._replica = replica
        self._proxy = proxy
        urls = {"broker.url": proxy.url, "redis.url": proxy.url}
        self.settings: Settings = load_settings({**urls, "worker.batch_size": 8})

    def hand_over(self) -> None:
        """Make the replica the primary; connections stay where they are, and new ones go to it."""
        self._proxy.redirect(self._replica.url)
        self._primary.hand_over(self._replica)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    directories = [tmp_path / name for name in ("primary", "replica")]
    for directory in directories:
        directory.mkdir()
    with RedisServer(directories[0]) as primary, RedisServer(directories[1]) as replica, Proxy(primary.url) as proxy:
        replica.follow(primary)
        yield Pair(primary, replica, proxy)


def test_an_idle_worker_and_a_client_follow_to_the_new_primary(pair: Pair, tmp_path: Path) -> None:
    before, after = short_traces(2, seed=1)
    with start_worker(pair.settings, tmp_path / "worker.log", command=FAST_WORKER), Client(pair.settings) as client:
        client.wait(client.submit(before), timeout_s=30)
        pair.hand_over()
        client.wait(client.submit(after), timeout_s=30)
    assert {decision["trace_id"] for decision in published(pair.settings)} == {before["id"], after["id"]}


def test_results_that_are_asked_for_are_stored_on_the_new_primary(pair: Pair, tmp_path: Path) -> None:
    before, after = short_traces(2, seed=3)
    with start_worker(pair.settings, tmp_path / "worker.log", command=FAST_WORKER) as worker, make_celery(pair.settings) as app:

        def is_stored(trace: dict[str, Any]) -> bool:
            task_id = app.send_task(TASK_NAME, args=[trace], ignore_result=False).id
            # Its own connections of the asking app may lead anywhere.
            with redis.Redis.from_url(pair.settings.redis.url) as client:
                return wait_until(lambda: bool(client.exists(f"celery-task-meta-{task_id}")), 20)

        assert is_stored(before)
        pair.hand_over()
        assert is_stored(after)
    assert worker.events("result_not_stored") == []


def test_a_worker_with_full_hands_loses_nothing(pair: Pair, tmp_path: Path) -> None:
    traces = short_traces(300, seed=2)
    with (
        start_worker(pair.settings, tmp_path / "worker.log", command=CRASHING_WORKER, variables=SLOW) as worker,
        Client(pair.settings) as client,
        Store.open(pair.settings) as store,
    ):
        for trace in traces:
            client.submit(trace)
        wait_until(lambda: len(worker.events("trace_decided")) > 20)
        pair.hand_over()
        assert store.ledger.counts().decided < 300, "too late to tell anything"
        wait_until(lambda: store.ledger.counts() == (300, 0, 300, 0))
    assert worker.process.returncode == 0
    assert {decision["trace_id"] for decision in published(pair.settings)} == {trace["id"] for trace in traces}
