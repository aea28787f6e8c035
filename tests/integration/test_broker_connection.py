"""A worker's connection to the broker: what it logs of it, in JSON Lines alone, and what is left of one that was lost."""

import json
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.process.consumer import server_of
from kp_scorer.settings import load_settings

from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.traces import fresh_samples

COUNTING_WORKER: Final = ("tests.support.counting_worker",)


def test_a_lost_connection_is_logged_with_its_reason_and_its_server(on_broker: SettingsWith, tmp_path: Path) -> None:
    settings = on_broker()
    with Proxy(settings.broker.url) as proxy:
        through = with_changed(settings, broker__url=proxy.url, redis__url=settings.redis.url, broker__timeout_s=2.0)
        with start_worker(through, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
            proxy.refuse()
            lost = wait_until(lambda: worker.events("connection_lost"))[0]
            unreached = wait_until(lambda: worker.events("consumer: Cannot connect to"))[0]
            proxy.accept()
            client.wait(client.submit(fresh_samples(1)[0]), timeout_s=60)
    server = urlsplit(proxy.url)
    assert lost["server"] == unreached["server"] == f"127.0.0.1:{server.port}"
    assert "Error" in lost["detail"]
    assert "is it running where broker.url says?" in unreached["detail"]
    assert f"{server.password}@" not in worker.text()
    # Neither that Celery stops, nor what it warns of whenever it has lost a connection.
    assert worker.process.returncode == 0
    events = [json.loads(line) for line in worker.text().splitlines()]
    assert [event for event in events if event["logger"] == "py.warnings"] == []


@pytest.mark.slow
def test_a_lost_connection_leaves_nothing_behind(on_broker: SettingsWith, tmp_path: Path) -> None:
    settings = on_broker()
    with Proxy(settings.broker.url) as proxy:
        through = with_changed(settings, broker__url=proxy.url, redis__url=settings.redis.url)
        with start_worker(through, tmp_path / "worker.log", command=COUNTING_WORKER) as worker, Client(settings) as client:
            for lost in range(1, 9):
                proxy.cut()
                wait_until(lambda lost=lost: len(worker.events("connection_lost")) >= lost)  # type: ignore[misc]
                client.wait(client.submit(fresh_samples(1)[0]), timeout_s=60)
    (transports,) = worker.events("transports")
    assert transports["count"] < 6, "those of this connection, of the pool, and of the last ones, which wait for their timers"


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("amqp://user:secret@rabbit/", "rabbit:5672"),
        ("amqps://rabbit/", "rabbit:5671"),
        ("redis://:secret@queue/0", "queue:6379"),
        ("redis+sentinel://one,two:26380/0?primary=scorer&sentinel_password=secret", "one:26379"),
    ],
)
def test_a_server_is_named_by_host_and_port_alone(url: str, server: str) -> None:
    with make_celery(load_settings({"broker.url": url, "redis.url": "redis://store/0"})) as app:
        assert server_of(app.connection_for_read()) == server
