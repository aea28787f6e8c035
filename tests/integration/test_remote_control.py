"""Who reaches the broker may ask a worker how it is, and can neither change nor confuse it, nor learn a trace or a secret."""

import base64
import json
import pickle
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.worker.control import Panel
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.redis_transport.mailbox import LARGEST_REQUEST_BYTES
from kp_scorer.client import Client
from kp_scorer.process.remote_control import RemoteControl
from kp_scorer.process.replies import MOST_WAITING
from kp_scorer.settings import Settings, load_settings

from tests.support.bombs import GZIP, bombs
from tests.support.crashing_worker import STALLS
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, Worker, start_worker, wait_until
from tests.support.rabbitmq import QUEUES, RabbitMQ, own_queues
from tests.support.traces import fresh_samples, short_traces

MARKER: Final = "content-of-a-trace"
FOREIGN: Final = "orders-of-another-application"
COMMANDS: Final[dict[str, dict[str, Any]]] = {
    "add_consumer": {"queue": FOREIGN},
    "autoscale": {"max": 1, "min": 1},
    "cancel_consumer": {},
    "disable_events": {},
    "election": {"id": "1", "topic": "task", "action": {"task": "score_trace", "args": []}},
    "enable_events": {},
    "heartbeat": {},
    "hello": {"from_node": "stranger@elsewhere", "revoked": {}},
    "memdump": {},
    "memsample": {},
    "no-such-command": {},
    "objgraph": {},
    "pool_grow": {"n": 100},
    "pool_restart": {"modules": ["antigravity"], "reload": True},
    "pool_shrink": {"n": 95},
    "query_task": {"ids": ["1"]},
    "rate_limit": {"task_name": "score_trace", "rate_limit": "1/h"},
    "report": {},
    "revoke": {"task_id": []},
    "revoke_by_stamped_headers": {"headers": {"kind": ["trace"]}},
    "shutdown": {},
    "terminate": {"signal": "KILL", "task_id": []},
    "time_limit": {"task_name": "score_trace", "hard": 0.001, "soft": 0.001},
}
QUESTIONS: Final = (
    *("active", "active_queues", "clock", "conf", "ping", "registered", "reserved", "revoked", "scheduled", "stats"),
)


class Target(NamedTuple):
    """A worker, and an application of somebody else on its broker."""

    settings: Settings
    worker: Worker
    stranger: Celery

    def ask(self, command: str, **arguments: Any) -> Any:
        """The worker's answer, as `celery inspect` and `celery control` get it."""
        answers = self.stranger.control.broadcast(command, arguments=arguments, reply=True, limit=1, timeout=10)
        assert len(answers) == 1, f"{command}: no answer"
        (answer,) = answers[0].values()
        return answer

    def is_well(self) -> None:
        """Its worker answers, decides what comes to its queue, and publishes that one decision and nothing else."""
        assert self.ask("ping") == {"ok": "pong"}
        assert [queue["name"] for queue in self.ask("active_queues")] == [self.settings.queues.traces]
        before = self.published()
        with Client(self.settings) as client:
            client.wait(client.submit(fresh_samples(1)[0]), timeout_s=30)
        wait_until(lambda: self.published() > before)
        assert self.published() == before + 1
        assert self.worker.process.poll() is None

    def published(self) -> int:
        """Messages on the queues of decisions."""
        with Connection(self.settings.broker.url) as connection:
            names = (self.settings.queues.accepted, self.settings.queues.rejected)
            return sum(connection.default_channel.queue_declare(name, passive=True).message_count for name in names)


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def target(request: pytest.FixtureRequest, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """One worker for all tests of a broker. Its Redis is a database that no other test empties."""
    store = redis_url.removesuffix("/0") + "/3"
    broker = store if request.param == "redis" else request.getfixturevalue("rabbitmq_url")
    settings = load_settings({"broker.url": broker, "redis.url": store, **own_queues()})
    log = tmp_path_factory.mktemp("target") / "worker.log"
    with ExitStack() as stack:
        if not settings.broker.is_redis:
            stack.enter_context(_these_queues(settings))
        worker = stack.enter_context(start_worker(settings, log, command=CRASHING_WORKER, variables={"STALL_S": "2"}))
        yield Target(settings, worker, stack.enter_context(_stranger(broker)))


def _stranger(broker: str) -> Any:
    return closing(Celery("another-application", broker=broker, set_as_current=False))


def _these_queues(settings: Settings) -> RabbitMQ:
    server = RabbitMQ(settings.broker.url, settings.redis.url)
    server._names = {f"queues.{kind}": getattr(settings.queues, kind) for kind in QUEUES}
    return server


def test_questions_are_answered_without_a_trace_and_without_a_secret(target: Target) -> None:
    trace = short_traces(1, seed=1)[0]
    trace["task"]["objective"] = f"{STALLS} {MARKER}"
    with Client(target.settings) as client:
        trace_id = client.submit(trace)
        (active,) = wait_until(lambda: target.ask("active"), timeout_s=10)
        answers = json.dumps({question: target.ask(question) for question in QUESTIONS})
        client.wait(trace_id, timeout_s=30)
    assert (active["id"], active["name"]) == (trace_id, "score_trace")
    password = urlsplit(target.settings.redis.url).password
    assert password
    assert "worker_concurrency" in answers
    assert [secret for secret in (MARKER, password, "://") if secret in answers] == []


def test_commands_have_no_effect(target: Target) -> None:
    assert {name for name, info in Panel.meta.items() if info.type == "control"} <= COMMANDS.keys()
    trace = fresh_samples(1)[0]
    arguments = {
        **COMMANDS,
        "cancel_consumer": {"queue": target.settings.queues.traces},
        "hello": {"from_node": "stranger@elsewhere", "revoked": {trace["id"]: 1e12}},
        "revoke": {"task_id": [trace["id"]]},
    }
    before = target.ask("stats")
    answers = {name: target.ask(name, **arguments[name]) for name in COMMANDS}
    assert {name for name, answer in answers.items() if "refused" not in str(answer)} == set()
    after = target.ask("stats")
    assert (after["pool"], after["prefetch_count"]) == (before["pool"], before["prefetch_count"])
    assert target.ask("revoked") == []
    with Client(target.settings) as client:
        assert client.wait(client.submit(trace), timeout_s=30).trace_id == trace["id"]
    target.is_well()
    refused = [event["command"] for event in target.worker.events("command_refused")]
    assert refused == [name if name in Panel.data else "unknown" for name in COMMANDS]


def test_what_is_no_request_is_passed_over(target: Target) -> None:
    publish = _publish_on_redis if target.settings.broker.is_redis else _publish_on_rabbitmq
    for body, properties in _hostile(target.settings):
        publish(target.settings.broker.url, body, properties)
    target.is_well()
    assert MARKER not in target.worker.text()


def test_a_reply_goes_to_no_queue_but_that_of_a_reply(target: Target) -> None:
    accepted = target.settings.queues.accepted
    there = {"exchange": "", "routing_key": accepted}
    own = str(uuid.uuid4())
    with Connection(target.settings.broker.url) as connection:
        # The name that the exchange of replies would send it by, if the worker used that.
        exchange = target.stranger.control.mailbox.reply_exchange(connection.default_channel)
        exchange.declare()
        connection.default_channel.queue_bind(accepted, exchange.name, own)
        publish = _publish_on_redis if target.settings.broker.is_redis else _publish_on_rabbitmq
        for reply_to in (there, {"exchange": exchange.name, "routing_key": own}, {"exchange": accepted, "routing_key": own}):
            publish(target.settings.broker.url, _request(reply_to=reply_to, ticket=str(uuid.uuid4())), {})
        try:
            target.is_well()
        finally:
            connection.default_channel.queue_unbind(accepted, exchange.name, own)
    if target.settings.broker.is_redis:
        # What nobody reads does not stay.
        with redis.Redis.from_url(target.settings.broker.url) as client:
            assert 0 < client.ttl(f"{own}.reply.celery.pidbox") <= 60


def test_who_consumes_does_not_wait_for_replies(settings: Settings, redis_client: redis.Redis) -> None:
    to = uuid.uuid4()
    with make_celery(settings) as app, app.connection_for_read() as connection, connection.clone() as asking:
        kinds = {"connection_errors": connection.connection_errors, "channel_errors": connection.channel_errors}
        consumer = SimpleNamespace(app=app, hostname="worker@here", obeys_commands=False, connection=connection, **kinds)
        control = RemoteControl(consumer)
        with ExitStack() as lent:
            for _ in range(app.producer_pool.limit):
                lent.enter_context(app.producer_pool.acquire())
            control.start(consumer)
            wait_until(lambda: _drained(connection) or redis_client.pubsub_numpat())
            producer, exchange = asking.Producer(), app.control.mailbox.exchange
            for _ in range(50):
                producer.publish(json.loads(_request(reply_to={"routing_key": str(to)})), exchange=exchange, declare=[exchange])
            began = time.monotonic()
            wait_until(lambda: not _drained(connection))
            assert time.monotonic() - began < settings.broker.timeout_s
        replies = f"{to}.reply.celery.pidbox"
        wait_until(lambda: int(redis_client.llen(replies)) >= MOST_WAITING)
        control.stop(consumer)
    assert int(redis_client.llen(replies)) <= MOST_WAITING + 1


def _drained(connection: Connection) -> bool:
    """Whether there was anything to be read."""
    try:
        connection.drain_events(timeout=0.2)
    except TimeoutError:
        return False
    return True


def test_a_worker_hears_no_gossip(target: Target) -> None:
    if not target.settings.broker.is_redis:
        pytest.skip("only Redis tells what is subscribed")
    with redis.Redis.from_url(target.settings.broker.url) as client:
        # The mailbox; gossip would be a second.
        assert sum(int(connection["psub"]) for connection in client.client_list() if connection["db"] == "3") == 1


def test_a_worker_whom_redis_refuses_the_mailbox_does_without(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    redis_client.acl_setuser("deaf", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all"], reset_channels=True)
    address = urlsplit(settings.broker.url)
    url = f"redis://deaf:secret@{address.hostname}:{address.port}{address.path}"
    refused = settings.model_copy(update={"broker": settings.broker.model_copy(update={"url": url})})
    with start_worker(refused, tmp_path / "worker.log", command=FAST_WORKER) as worker, Client(settings) as client:
        (line,) = wait_until(lambda: worker.events("remote_control_unavailable"))
        for trace in fresh_samples(2):
            client.wait(client.submit(trace), timeout_s=30)
    redis_client.acl_deluser("deaf")
    assert "NOPERM" in line["detail"]
    assert len(worker.events("remote_control_unavailable")) == 1
    assert worker.text().count("Connected to ") == 1


def test_a_setting_has_commands_obeyed(settings: Settings, tmp_path: Path) -> None:
    obeying = settings.model_copy(update={"worker": settings.worker.model_copy(update={"obey_commands": True})})
    with (
        start_worker(obeying, tmp_path / "worker.log", command=FAST_WORKER) as worker,
        _stranger(settings.broker.url) as stranger,
    ):
        target = Target(obeying, worker, stranger)
        assert target.ask("pool_restart") == {"error": "ValueError"}
        assert target.ask("add_consumer", queue=FOREIGN) == {"ok": f"add consumer {FOREIGN}"}
        wait_until(lambda: len(target.ask("active_queues")) == 2)
        stranger.control.shutdown()
        assert worker.process.wait(30) == 0


def _request(**changed: Any) -> bytes:
    return json.dumps({"method": "ping", "arguments": {}, "destination": None, **changed}).encode()


def _hostile(settings: Settings) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Bodies and properties of messages, none of which a worker must act on, or fail on."""
    accepted = {"exchange": "", "routing_key": settings.queues.accepted}
    shutdown = _request(method="shutdown")
    odd_fields: dict[str, tuple[Any, ...]] = {
        "method": (None, 7, [], {}, MARKER, "__class__"),
        "arguments": ([], 7, {"state": 1}, {MARKER: 1}),
        "destination": (7, {}, MARKER, [7], ["someone@elsewhere"]),
        "reply_to": (7, [], {}, MARKER, accepted, {"routing_key": None}),
        "ticket": (7, {}, MARKER),
    }
    yield from ((body, {}) for body in (b"[]", b"null", b"7", b"{}", b"{", b"", b"\xff\xfe", MARKER.encode(), b"[" * 60_000))
    yield pickle.dumps({"method": "shutdown"}), {"content_type": "application/x-python-serialize"}
    yield zlib.compress(shutdown), {"headers": {"compression": GZIP}}
    yield bombs()[GZIP], {"headers": {"compression": GZIP}}
    yield b" " * LARGEST_REQUEST_BYTES + _request(), {}
    yield from ((_request(), {"headers": {"clock": clock}}) for clock in ("x", 2**62, -1))
    yield from ((_request(), {"content_encoding": encoding}) for encoding in ("bz2_codec", "punycode", MARKER))
    yield _request(), {"content_type": MARKER}
    yield _request(pattern="(a+)+$", matcher="pcre"), {}
    yield from ((_request(**{field: odd}), {}) for field, values in odd_fields.items() for odd in values)


def _publish_on_redis(url: str, body: bytes, properties: dict[str, Any]) -> None:
    headers = properties.get("headers", {})
    described = {
        "content-type": properties.get("content_type", "application/json"),
        "content-encoding": properties.get("content_encoding", "utf-8"),
        "properties": {"body_encoding": "base64", "delivery_tag": "1"},
    }
    encoded = base64.b64encode(body).decode()
    with redis.Redis.from_url(url) as client:
        assert client.publish("/3.celery.pidbox", json.dumps({"body": encoded, "headers": headers, **described})) == 1
        # Without an envelope, and with one that lacks something.
        client.publish("/3.celery.pidbox", body)
        client.publish("/3.celery.pidbox", json.dumps({"body": encoded, "headers": 7}))
        client.publish("/3.celery.pidbox", json.dumps({"properties": [], "body": [encoded]}))


def _publish_on_rabbitmq(url: str, body: bytes, properties: dict[str, Any]) -> None:
    with Connection(url) as connection:
        connection.Producer().publish(
            body,
            exchange="celery.pidbox",
            serializer=None,
            content_type=properties.get("content_type", "application/json"),
            content_encoding=properties.get("content_encoding", "utf-8"),
            headers=properties.get("headers", {}),
        )
