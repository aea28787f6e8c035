"""A worker survives a lost connection to the broker, and answers and obeys Celery's commands only if a setting allows it."""

import json
import os
import signal
from contextlib import closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kp_scorer.client import Client
from kp_scorer.errors import QueueFull
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.processes import PATIENCE_S, at_work, free_port, start_worker, wait_until
from tests.support.prometheus import scraped
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ, declare_as_worker, limited_by_policy
from tests.support.servers import RedisServer
from tests.support.traces import fresh_samples

COUNTING_WORKER: Final = ("tests.support.counting_worker",)
EAGER_WORKER: Final = ("tests.support.eager_worker",)


@pytest.mark.slow
@pytest.mark.parametrize("queues", [["traces"], ["traces.a", "traces.b", "traces.c"]], ids=["one queue", "three queues"])
def test_a_lost_connection_is_logged_with_reason_and_server_and_leaves_nothing(
    queues: list[str], on_broker: SettingsWith, tmp_path: Path
) -> None:
    settings = on_broker(queues__traces={queue: {} for queue in queues})
    with Proxy(settings.broker.url) as proxy:
        through = with_changed(settings, broker__url=proxy.url, redis__url=settings.redis.url, broker__timeout_s=2.0)
        with at_work(through, tmp_path, command=COUNTING_WORKER) as (worker, _), Client(settings) as client:
            proxy.refuse()
            lost = wait_until(lambda: worker.events("connection_lost"))[0]
            unreached = wait_until(lambda: worker.events("consumer: Cannot connect to"))[0]
            proxy.accept()
            client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)
            for before in range(len(worker.events("connection_lost")), 9):
                proxy.cut()
                wait_until(lambda before=before: len(worker.events("connection_lost")) > before)  # type: ignore[misc]
                client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)
            counted_before = len(worker.events("transports"))
            counts = wait_until(lambda: worker.events("transports")[counted_before:])
    server = urlsplit(proxy.url)
    assert lost["server"] == unreached["server"] == f"127.0.0.1:{server.port}"
    assert "Error" in lost["detail"]
    assert "is it running where broker.url says?" in unreached["detail"]
    assert f"{server.password}@" not in worker.text()
    assert counts[-1]["count"] < 6, "those of this connection, of the pool, and of the last ones, which wait for their timers"
    # Celery must not stop, and its usual warning about a lost connection must not appear.
    assert worker.process.returncode == 0
    events = [json.loads(line) for line in worker.text().splitlines()]
    assert [event for event in events if event["logger"] == "py.warnings"] == []


@pytest.mark.parametrize("broker", ["rabbitmq"])
def test_a_worker_outlives_any_number_of_failed_attempts_to_connect(on_broker: SettingsWith, tmp_path: Path) -> None:
    settings = on_broker()
    with Proxy(settings.broker.url) as proxy:
        through = with_changed(settings, broker__url=proxy.url, redis__url=settings.redis.url)
        with at_work(through, tmp_path, command=EAGER_WORKER) as (worker, client):
            proxy.refuse()
            # Celery's own consumer ends its worker after a hundred.
            wait_until(lambda: len(worker.events("consumer: Cannot connect to")) > 150 or worker.process.poll() is not None)
            assert worker.process.poll() is None
            proxy.accept()
            client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)


def test_a_server_that_takes_connections_and_serves_none_is_tried_once_a_second(tmp_path: Path, settings: Settings) -> None:
    with (
        RedisServer(tmp_path) as server,
        server.connect() as client,
        at_work(with_changed(settings, broker__url=server.url), tmp_path) as (worker, _),
    ):
        # A replica refuses writes.
        client.replicaof("127.0.0.1", "1")
        lost = wait_until(lambda: (events := worker.events("connection_lost"))[4:] and events)
        client.replicaof("no", "one")
    first, *_, last = (datetime.fromisoformat(line["timestamp"]) for line in lost)
    assert (last - first).total_seconds() > len(lost) - 2
    assert {line["level"] for line in map(json.loads, worker.text().splitlines())} == {"info", "warning"}


def asked(settings: Settings, command: str, timeout_s: float = 10.0, **arguments: Any) -> list[Any]:
    """Return the answers that another application on the broker gets to a command of Celery's."""
    with closing(Celery("another-application", broker=settings.broker.url, set_as_current=False)) as app:
        return list(app.control.broadcast(command, arguments=arguments, reply=True, limit=1, timeout=timeout_s) or [])


def test_users_of_the_broker_can_neither_query_nor_control_a_worker(
    on_broker: SettingsWith, redis_client: redis.Redis, tmp_path: Path
) -> None:
    settings = on_broker()
    with at_work(settings, tmp_path) as (worker, client):
        if settings.broker.is_redis:
            assert redis_client.pubsub_numpat() == 0
            assert list(redis_client.scan_iter("*kombu*")) + list(redis_client.scan_iter("*pidbox*")) == []
        assert asked(settings, "shutdown", timeout_s=2.0) == []
        client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)
        assert worker.process.poll() is None


MONITORS: Final = ("stats", "active", "scheduled", "reserved", "revoked", "registered", "active_queues", "conf")
"""The commands that Flower sends to each worker."""


def test_a_setting_has_a_worker_answer_and_obey_celery_on_rabbitmq(rabbitmq: RabbitMQ, store: Store, tmp_path: Path) -> None:
    settings = rabbitmq.settings(worker__remote_control=True, metrics__port=free_port())
    queue = settings.queues.first
    with at_work(settings, tmp_path) as (worker, client):
        # The worker answers the commands that monitors send.
        for command in MONITORS:
            (answer,) = wait_until(partial(asked, settings, command))
            assert not any("error" in reply for reply in answer.values()), answer
        # A worker that is told not to consume its queue is not ready.
        wait_until(lambda: scraped(settings)["kp_scorer_ready"] == 1.0)
        for command, is_ready in (("cancel_consumer", 0.0), ("add_consumer", 1.0)):
            asked(settings, command, queue=queue)
            wait_until(lambda is_ready=is_ready: scraped(settings)["kp_scorer_ready"] == is_ready)  # type: ignore[misc]
            wait_until(lambda is_ready=is_ready: _reasons(store) == [queue] * (not is_ready))  # type: ignore[misc]
        client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)
        # The worker ends when a command tells it to.
        asked(settings, "shutdown", timeout_s=1.0)
        assert worker.process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("options", [("-Q", "other"), ("-X", "traces")])
def test_a_worker_that_is_started_for_another_queue_is_not_ready(
    options: tuple[str, str], settings: Settings, store: Store, tmp_path: Path
) -> None:
    settings = with_changed(settings, embedding__embedder="none", queues__traces="traces")
    with start_worker(settings, tmp_path / "log", command=("celery", "-A", "kp_scorer.app", "worker", *options)):
        wait_until(lambda: _reasons(store) == ["traces"])


def _reasons(store: Store) -> list[str]:
    """Return the queues that workers report they do not consume, and ignore all other reasons for not being ready."""
    reasons = [reason for report in store.worker_reports() for reason in report.not_ready]
    return [reason.split("does not consume ")[1].split(",")[0] for reason in reasons if "does not consume" in reason]


def test_a_signal_logs_the_stacks_of_all_threads_in_one_line(settings: Settings, tmp_path: Path) -> None:
    with at_work(settings, tmp_path) as (worker, _):
        os.kill(worker.process.pid, signal.SIGUSR1)
        (line,) = wait_until(lambda: worker.events("stacks"))
        assert "MainThread" in line["exception"]
        assert all(line.startswith("{") for line in worker.text().splitlines())


def test_a_policy_that_limits_the_queue_of_traces_is_named_as_the_reason(rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    declare_as_worker(settings)
    with limited_by_policy(settings, settings.queues.first, 1), Client(settings) as client:

        def refusals() -> list[str]:
            try:
                client.submit(fresh_samples(1)[0])
            except QueueFull as error:
                return [str(error)]
            return []

        assert "a policy limits its length" in wait_until(refusals)[0]
