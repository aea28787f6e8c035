"""When a password changes, running workers and clients read the new one from the file of the URL."""

from pathlib import Path
from typing import Final

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.wire import TASK_NAME
from kp_scorer.client import Client
from kp_scorer.endpoints import with_endpoints
from kp_scorer.settings import Settings, load_settings

from tests.support.processes import at_work, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import change_password, own_user
from tests.support.servers import RedisServer
from tests.support.traces import fresh_samples

NO_URLS: Final = {"KP_BROKER_URL": "", "KP_REDIS_URL": ""}


def test_workers_and_clients_go_on_with_a_changed_password_of_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "url"
    first, second, third = fresh_samples(3)
    with RedisServer(tmp_path) as server, server.connect() as admin:
        admin.execute_command("ACL", "SETUSER", "worker", "on", ">first", "~*", "&*", "+@all")
        file.write_text(server.url.replace("//", "//worker:first@"), "utf-8")
        monkeypatch.setenv("KP_BROKER_URL_FILE", str(file))
        monkeypatch.setenv("KP_REDIS_URL_FILE", str(file))
        from_file = load_settings()
        variables = {**NO_URLS, "KP_BROKER_URL_FILE": str(file), "KP_REDIS_URL_FILE": str(file)}
        with at_work(from_file, tmp_path, variables=variables) as (worker, client), make_celery(from_file) as app:
            client.wait(client.submit(first), timeout_s=30)
            # Revoke the old password before the file has the new one, an order that the page advises against.
            admin.execute_command("ACL", "SETUSER", "worker", "resetpass", ">second")
            admin.client_kill_filter(user="worker")
            wait_until(lambda: "WRONGPASS" in worker.text())
            file.write_text(server.url.replace("//", "//worker:second@"), "utf-8")
            client.wait(client.submit(second), timeout_s=60)
            answer = app.send_task(TASK_NAME, args=[third], queue=from_file.queues.first, ignore_result=False)
            assert answer.get(timeout=30)["trace_id"] == third["id"]


def test_workers_and_clients_go_on_with_a_changed_password_of_rabbitmq(
    rabbitmq_url: str, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "url"
    first, second = fresh_samples(2)
    with Proxy(rabbitmq_url) as proxy, own_user(rabbitmq_url) as user:
        address = proxy.url.rpartition("@")[2]
        file.write_text(f"amqp://{user}:first@{address}", "utf-8")
        monkeypatch.setenv("KP_BROKER_URL_FILE", str(file))
        from_file = load_settings({"redis.url": settings.redis.url, "broker.timeout_s": 10.0})
        variables = {**NO_URLS, "KP_REDIS_URL": settings.redis.url, "KP_BROKER_URL_FILE": str(file)}
        with at_work(from_file, tmp_path, variables=variables) as (worker, client):
            client.wait(client.submit(first), timeout_s=30)
            change_password(user, "second")
            proxy.cut()
            refused = worker.logged("consumer: Cannot connect to", 3)
            file.write_text(f"amqp://{user}:second@{address}", "utf-8")
            with Client(from_file) as later:
                later.wait(later.submit(second), timeout_s=60)
            client.wait(client.submit(second), timeout_s=60)
    assert all("ACCESS_REFUSED" in line["detail"] for line in refused)
    assert "critical" not in worker.text()


def test_a_url_of_a_flag_is_not_read_again_in_the_file_of_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "url"
    file.write_text("redis://worker:first@localhost", "utf-8")
    monkeypatch.setenv("KP_BROKER_URL_FILE", str(file))
    assert not load_settings({"broker.url": "redis://worker:other@localhost"}).broker.is_renewed
    renewed = load_settings().broker
    assert renewed.server_now().password == "first"
    file.write_text("redis://worker:second@localhost", "utf-8")
    assert with_endpoints(load_settings()).redis.server_now().password == "second"
    assert (renewed.server_now().password, renewed.server().password) == ("second", "first")
    # The file may be read while it is being written.
    for unusable in ("", "redis://", "redis://localhost"):
        file.write_text(unusable, "utf-8")
        assert renewed.server_now().password == "first"
