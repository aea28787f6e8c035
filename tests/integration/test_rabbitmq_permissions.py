"""RabbitMQ's users with the permissions that the documents give them: enough for what they show, and for no neighbour."""

import json
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import pytest
from amqp import Message
from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher, open_results
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store

from tests.support.builders import decision_on
from tests.support.documents import code_with
from tests.support.processes import FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import confirming
from tests.support.traces import fresh_samples

USERS: Final = ("producer", "client", "reader", "worker", "declaring", "operator")
QUEUES: Final = ("traces", "traces.dead", "decisions.accepted", "decisions.rejected", "neighbour")


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
    one, two, three, four = fresh_samples(4)
    worker_settings, operator = users.settings("worker"), users.settings("operator")
    with Connection(rabbitmq_url) as admin, Client(users.settings("client")) as client:
        admin.default_channel.queue_declare("neighbour", durable=True, auto_delete=False)
        with pytest.raises(ServiceUnavailable, match=r"no queue 'traces'.*start a worker"):
            client.submit(two)
        with (
            start_worker(worker_settings, tmp_path / "worker.log", command=FAST_WORKER) as worker,
            Celery("producer", broker=users.url("producer"), set_as_current=False) as producer,
        ):
            exec(code_with("declare=[]"), {"app": producer, "trace": one})
            assert client.wait(client.submit(two), timeout_s=30).trace_id == two["id"]
            wait_until(lambda: len(worker.events("trace_decided")) == 2)
            _declare_and_send(users.url("declaring"), four)
            assert client.wait(str(four["id"]), timeout_s=30)
            _send_beyond(users.url("producer"))
            wait_until(lambda: worker.events("trace_dead"))
        with Connection(users.url("reader")) as reader:
            decided = [reader.default_channel.basic_get(queue, no_ack=True) for queue in QUEUES if "decisions" in queue]
            read = [found.properties["message_id"] for found in decided if found]
            assert read
        with make_celery(operator) as app, open_results(app, operator) as results:
            taken = [found.decision["trace_id"] for found in results.take()]
        assert sorted([*read, *taken]) == sorted([one["id"], two["id"], four["id"]])
        for user in USERS:
            _refuses(users.url(user), "neighbour")
        for user in ("producer", "client"):
            _may_only_submit(users.url(user))
        assert admin.default_channel.queue_declare("neighbour", passive=True).message_count == 0
        admin.default_channel.queue_delete("traces")
        with pytest.raises(ServiceUnavailable, match="start a worker"):
            client.submit(three)
    assert worker.process.returncode == 0
    assert not re.search("ACCESS_REFUSED", worker.text())


def test_a_worker_may_call_tasks_by_the_queue_of_another_app(users: Users, rabbitmq_url: str, store: Store) -> None:
    given = users.settings("worker")
    called = {"queues.accepted": "shop", "results.accepted_via": "task", "results.task": "shop.decided"}
    settings = load_settings({"broker.url": given.broker.url, "redis.url": given.redis.url, **called})
    decision = Decision.model_validate_json(decision_on("kp:trace:called")).model_copy(update={"outcome": "accepted"})
    with Connection(rabbitmq_url) as admin, make_celery(settings) as app:
        publisher = Publisher(app, settings, store)
        with pytest.raises(ServiceUnavailable, match="RabbitMQ has no queue 'shop'"):
            publisher.publish(decision)
        admin.default_channel.queue_declare("shop", durable=True, auto_delete=False)
        publisher.publish(decision)
        assert admin.default_channel.queue_declare("shop", passive=True).message_count == 1
        admin.default_channel.queue_delete("shop")


def _send_beyond(url: str) -> None:
    """Send a message that is no submission to the queue of traces, and name other queues in its headers."""
    headers = {name: list(QUEUES) for name in ("CC", "BCC")}
    with confirming(url) as connection:
        connection.Producer().publish([], exchange="traces", routing_key="traces", headers=headers, mandatory=True)


def _declare_and_send(url: str, trace: dict[str, Any]) -> None:
    """Submit a trace as clients do that declare the queue they send to."""
    with confirming(url) as connection, connection.channel() as channel:
        channel.exchange_declare("default", "direct", durable=True, auto_delete=True)
        channel.queue_declare("traces.intake", durable=True, auto_delete=False)
        message = Message(json.dumps(trace), content_type="application/json")
        channel.basic_publish(message, routing_key="traces.intake", mandatory=True)
    for act in ("basic_get", "basic_consume", "queue_purge"):
        _refused(url, methodcaller(act, "traces.intake"))
    for queue in QUEUES:
        _refused(url, methodcaller("queue_declare", queue, durable=True, auto_delete=False))


def _may_only_submit(url: str) -> None:
    """Assert that this user may read no queue, send to none by another way, and declare nothing."""
    message = Message(b"7")
    for queue in QUEUES:
        _refuses(url, queue)
        _refused(url, methodcaller("basic_publish", message, routing_key=queue))
        _refused(url, methodcaller("queue_declare", queue, durable=True, auto_delete=False))
        _refused(url, methodcaller("queue_bind", queue, "traces", "traces"))
    for exchange in ("amq.direct", "amq.fanout", "amq.topic", "amq.headers", "celery.pidbox"):
        _refused(url, methodcaller("basic_publish", message, exchange=exchange, routing_key="traces"))
    _refused(url, methodcaller("queue_declare", "mine"))
    _refused(url, methodcaller("queue_declare"))
    _refused(url, methodcaller("exchange_declare", "mine", "direct"))
    _refused(url, methodcaller("exchange_delete", "traces"))
    _refused(url, methodcaller("queue_unbind", "traces", "traces", "traces"))


def _refuses(url: str, queue: str) -> None:
    """Assert that this user may neither take from a queue, nor change it."""
    for act in ("basic_get", "basic_consume", "queue_purge", "queue_delete"):
        _refused(url, methodcaller(act, queue))


def _refused(url: str, act: Callable[[Any], object]) -> None:
    with confirming(url) as connection, connection.channel() as channel, pytest.raises(AccessRefused):
        act(channel)
