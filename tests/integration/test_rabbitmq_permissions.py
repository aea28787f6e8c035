"""RabbitMQ's users with the permissions that the documents give them: enough for what they show, and for no neighbour."""

import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Connection, Queue
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import open_results
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings

from tests.support.documents import code_with
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.traces import fresh_samples

USERS: Final = ("producer", "client", "worker", "operator")


class Users:
    """The documented users, under names of this test's own, in its virtual host."""

    def __init__(self, url: str, redis_url: str) -> None:
        self.suffix = uuid.uuid4().hex
        self._url, self._redis_url = url, redis_url

    def url(self, user: str) -> str:
        """The URL by which a user connects."""
        return f"amqp://{user}-{self.suffix}:secret@{self._url.rpartition('@')[2]}"

    def settings(self, user: str) -> Settings:
        """Settings for this user; of Redis they have all permissions."""
        return load_settings({"broker.url": self.url(user), "redis.url": self._redis_url})


@pytest.fixture
def users(rabbitmq_url: str, settings: Settings) -> Iterator[Users]:
    vhost = rabbitmq_url.rpartition("/")[2]
    if shutil.which("rabbitmqctl") is None or not vhost.startswith("kp-test-"):
        pytest.skip("no rabbitmqctl here may make users")
    made = Users(rabbitmq_url, settings.redis.url)
    rules = [shlex.split(line) for line in code_with("rabbitmqctl set_permissions").splitlines()]
    assert [rule[4] for rule in rules] == list(USERS)
    try:
        for user, rule in zip(USERS, rules, strict=True):
            _control("add_user", f"{user}-{made.suffix}", "secret")
            _control("set_permissions", "--vhost", vhost, f"{user}-{made.suffix}", *rule[5:])
        yield made
    finally:
        for user in USERS:
            _control("delete_user", f"{user}-{made.suffix}", check=False)


def _control(*arguments: str, check: bool = True) -> None:
    subprocess.run(["rabbitmqctl", *arguments], check=check, capture_output=True, timeout=60)


@pytest.mark.slow
def test_each_may_do_its_part_and_reach_no_neighbour(users: Users, rabbitmq_url: str, tmp_path: Path) -> None:
    one, two = fresh_samples(2)
    worker_settings, operator = users.settings("worker"), users.settings("operator")
    with Connection(rabbitmq_url) as admin:
        admin.default_channel.queue_declare("neighbour", durable=True, auto_delete=False)
        with (
            start_worker(worker_settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
            Client(users.settings("client")) as client,
            Celery("producer", broker=users.url("producer"), set_as_current=False) as producer,
        ):
            producer.conf.broker_transport_options = {"confirm_publish": True}
            producer.send_task("score_trace", args=[one], queue=Queue("traces", no_declare=True), mandatory=True)
            assert client.wait(client.submit(two), timeout_s=30).trace_id == two["id"]
            wait_until(lambda: len(worker.events("trace_decided")) == 2)
        with make_celery(operator) as app, open_results(app, operator) as results:
            taken = [found.decision["trace_id"] for found in results.take()]
        assert sorted(taken) == sorted([one["id"], two["id"]])
        for user in USERS:
            _refuses(users.url(user), "neighbour")
        _refuses(users.url("producer"), "traces")
        _refuses(users.url("client"), "decisions.accepted")
    assert worker.process.returncode == 0
    assert not re.search("ACCESS_REFUSED", worker.text())


def _refuses(url: str, queue: str) -> None:
    """Assert that this user may neither take from a queue, nor change it."""
    for act in ("basic_get", "queue_purge", "queue_delete"):
        with Connection(url) as connection, connection.channel() as channel, pytest.raises(AccessRefused):
            getattr(channel, act)(queue)
