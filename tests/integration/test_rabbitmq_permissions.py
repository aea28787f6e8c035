"""RabbitMQ's users have the documented permissions: enough for what the documents show, and none for a neighbour's queues."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import pytest
from amqp import Message
from amqp.exceptions import AccessRefused, ChannelError
from celery import Celery
from kombu import Connection
from kp_scorer import read_decisions
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import Publisher
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.builders import decision
from tests.support.changed_settings import with_changed
from tests.support.documents import code_with
from tests.support.outcomes import publish
from tests.support.permissions import documented
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.rabbitmq import RABBITMQ_URL, Users, confirming, documented_users, own_virtual_host
from tests.support.traces import fresh_samples

INTAKE: Final = "traces.intake"
QUEUES: Final = ("traces", "traces.dead", "decisions.accepted", "decisions.rejected", "neighbour")


@pytest.fixture
def users(rabbitmq_url: str, settings: Settings) -> Iterator[Users]:
    with documented_users(rabbitmq_url, settings.redis.url) as made:
        yield made


@pytest.mark.slow
def test_each_user_may_do_its_part_and_reaches_no_neighbour(users: Users, rabbitmq_url: str, tmp_path: Path) -> None:
    first, second, third, fourth = fresh_samples(4)
    worker_settings = users.settings("worker")
    with Connection(rabbitmq_url) as admin, Client(users.settings("client")) as client:
        # An earlier test may have left this queue.
        admin.default_channel.queue_delete("traces")
        with pytest.raises(ServiceUnavailable, match=r"no queue 'traces'.*start a worker"):
            client.submit(second)
        with (
            at_work(worker_settings, tmp_path) as (worker, _),
            Celery("producer", broker=users.url("producer"), set_as_current=False) as producer,
        ):
            exec(code_with("declare=[]"), {"app": producer, "trace": first})
            assert client.wait(client.submit(second), timeout_s=PATIENCE_S).trace_id == second["id"]
            wait_until(lambda: len(worker.events("trace_decided")) == 2)
            _declare_and_send(users.url("declaring"), fourth)
            assert client.wait(str(fourth["id"]), timeout_s=PATIENCE_S)
            _send_beyond(users.url("producer"))
            wait_until(lambda: worker.events("trace_dead"))
        with Connection(users.url("reader")) as reader:
            decided = [reader.default_channel.basic_get(queue, no_ack=True) for queue in QUEUES if "decisions" in queue]
            read = [message.properties["message_id"] for message in decided if message]
            assert read
        consumed = [decision.trace_id for decision in read_decisions(follow=False, settings=users.settings("reader"))]
        assert sorted([*read, *consumed]) == sorted([first["id"], second["id"], fourth["id"]])
        admin.default_channel.queue_delete("traces")
        with pytest.raises(ServiceUnavailable, match="start a worker"):
            client.submit(third)
    assert worker.process.returncode == 0
    assert not re.search("ACCESS_REFUSED", worker.text())


def test_a_worker_may_call_tasks_by_the_queue_of_another_app(users: Users, rabbitmq_url: str, store: Store) -> None:
    # From RabbitMQ 4.2.6 on, a worker may look only at queues for which it has a permission.
    called = {"queues__decisions": "decisions.shop", "results__via": "task", "results__task": "shop.decided"}
    settings = with_changed(users.settings("worker"), **called)
    accepted = decision("kp:trace:called", outcome="accepted")
    with Connection(rabbitmq_url) as admin, make_celery(settings) as app:
        publisher = Publisher(app, settings, store)
        with pytest.raises(ServiceUnavailable, match=r"RabbitMQ has no queue 'decisions\.shop\.accepted'"):
            publish(publisher, accepted)
        admin.default_channel.queue_declare("decisions.shop.accepted", durable=True, auto_delete=False)
        publish(publisher, accepted)
        assert admin.default_channel.queue_declare("decisions.shop.accepted", passive=True).message_count == 1
        admin.default_channel.queue_delete("decisions.shop.accepted")


def _send_beyond(url: str) -> None:
    """Send a message that is no submission to the queue of traces, with headers that name other queues."""
    headers = {name: list(QUEUES) for name in ("CC", "BCC")}
    with confirming(url) as connection:
        connection.Producer().publish([], exchange="traces", routing_key="traces", headers=headers, mandatory=True)


def _declare_and_send(url: str, trace: dict[str, Any]) -> None:
    """Submit a trace like a client that declares the queue to which it sends."""
    with confirming(url) as connection, connection.channel() as channel:
        channel.exchange_declare("default", "direct", durable=True, auto_delete=True)
        channel.queue_declare("traces.intake", durable=True, auto_delete=False)
        message = Message(json.dumps(trace), content_type="application/json")
        channel.basic_publish(message, routing_key="traces.intake", mandatory=True)


Act = Callable[[Any], object]


def _read(queue: str) -> list[Act]:
    return [methodcaller(act, queue) for act in ("basic_get", "basic_consume", "queue_purge")]


def _send(exchange: str, routing_key: str) -> Act:
    return methodcaller("basic_publish", Message(b"7"), exchange=exchange, routing_key=routing_key)


LOOK: Final = "see length and consumers of any queue, before RabbitMQ 4.2.6"
VERBS: Final[dict[str, list[Act]]] = {
    "submit by the exchange `traces`": [_send("traces", "traces")],
    "send to any queue of the virtual host": [_send("", queue) for queue in QUEUES],
    "read or purge the queue of traces": _read("traces"),
    "read or purge the dead queue": _read("traces.dead"),
    "read or purge decisions": _read("decisions.accepted"),
    "declare and delete our queues and exchange": [
        *(methodcaller("queue_declare", queue, durable=True, auto_delete=False) for queue in QUEUES if queue != "neighbour"),
        *(methodcaller("queue_delete", queue) for queue in QUEUES if queue != "neighbour"),
        methodcaller("exchange_delete", "traces"),
        methodcaller("queue_unbind", "traces", "traces", "traces"),
    ],
    "declare the intake and send to it": [methodcaller("queue_declare", INTAKE, durable=True, auto_delete=False)],
    "delete the intake": [methodcaller("queue_delete", INTAKE)],
    "read or purge the intake": _read(INTAKE),
    "bind a queue to an exchange": [methodcaller("queue_bind", queue, "traces", "traces") for queue in QUEUES],
    "declare a queue or an exchange of its own": [
        methodcaller("queue_declare", "mine"),
        methodcaller("queue_declare"),
        methodcaller("exchange_declare", "mine", "direct"),
    ],
    "read, purge or delete a neighbour's queue": [*_read("neighbour"), methodcaller("queue_delete", "neighbour")],
    "publish to another exchange": [_send(f"amq.{kind}", "traces") for kind in ("direct", "fanout", "topic", "headers")],
    LOOK: [methodcaller("queue_declare", "neighbour", passive=True)],
}


@pytest.mark.slow
def test_each_user_may_do_what_the_security_page_says_and_nothing_else(rabbitmq_url: str) -> None:
    allowed: dict[str, list[str]] = {}
    with own_virtual_host(RABBITMQ_URL) as url, documented_users(url, "") as users, Connection(url) as admin:
        for user in documented("RabbitMQ"):
            with confirming(users.url(user)) as connection:
                allowed[user] = [verb for verb, acts in VERBS.items() if _may(connection, admin, acts)]
        version = tuple(map(int, admin.connection.server_properties["version"].split(".")))
    expected = documented("RabbitMQ")
    if version >= (4, 2, 6):
        expected = {user: [verb for verb in verbs if verb != LOOK] for user, verbs in expected.items()}
    assert allowed == expected


def _may(connection: Connection, admin: Connection, acts: Sequence[Act]) -> bool:
    """Make the queues and the exchange that these acts need; return whether a user may perform any of them."""
    for queue in (*QUEUES, INTAKE):
        admin.default_channel.queue_declare(queue, durable=True, auto_delete=False)
    admin.default_channel.exchange_declare("traces", "direct", durable=True, auto_delete=False)
    return not all(_is_refused(connection, act) for act in acts)


def _is_refused(connection: Connection, act: Act) -> bool:
    # A refusal closes only the channel.
    with connection.channel() as channel:
        try:
            act(channel)
        except AccessRefused:
            return True
        except ChannelError:
            # The user has the permission, but the queue does not exist or was declared differently.
            return False
    return False
