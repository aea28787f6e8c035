"""Any client can declare the intake queue on RabbitMQ, and its messages move to the queue of traces, once or twice."""

import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import amqp
import pytest
from amqp.exceptions import NotFound, PreconditionFailed
from kombu import Connection
from kp_scorer.broker import dead_queue
from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.calls import declare_queues
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.dead_queue import QueueDrainer
from kp_scorer.broker.headers import DELIVERY_COUNT
from kp_scorer.broker.publishing import publish_confirmed
from kp_scorer.broker.wire import BEGINNING_BYTES, largest_body_bytes
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.settings.server_sections import intake_name
from kp_scorer.store import Store

from tests.support.attacks import GZIP
from tests.support.builders import first_queues
from tests.support.changed_settings import with_changed
from tests.support.processes import CRASHING_WORKER, PATIENCE_S, at_work, free_port, launch_worker, wait_until
from tests.support.rabbitmq import RabbitMQ, confirming, limited_by_policy
from tests.support.traces import short_traces


@pytest.fixture
def settings_here(rabbitmq: RabbitMQ) -> Settings:
    return rabbitmq.settings()


@pytest.fixture
def intake(settings_here: Settings, store: Store) -> Iterator[QueueDrainer]:
    """A drainer of the intake, on an app whose queues are declared."""
    queues = first_queues(settings_here)
    assert queues.intake
    with make_celery(settings_here) as app:
        declare_queues(app, [*queues.in_order, queues.intake])
        yield QueueDrainer(app, queues.intake, queues, store)


def put(settings: Settings, bodies: Sequence[bytes], **properties: Any) -> None:
    """Declare the intake as most clients do, and send to it through the default exchange."""
    properties = {"content_type": "application/json", **properties}
    with confirming(settings.broker.url) as connection:
        channel = connection.default_channel
        channel.queue_declare(intake_name(settings.queues.first), durable=True, auto_delete=False)
        for body in bodies:
            channel.basic_publish(
                amqp.Message(body, **properties), routing_key=intake_name(settings.queues.first), mandatory=True
            )


def get_all(settings: Settings) -> list[Any]:
    """Receive all messages on the queue of traces, and return them."""
    with Connection(settings.broker.url) as connection:
        return list(iter(lambda: connection.default_channel.basic_get(settings.queues.first, no_ack=True), None))


def receive(rabbitmq: RabbitMQ, count: int) -> list[Any]:
    """Wait until ``count`` messages are on the queue of traces, and return them."""
    wait_until(lambda: rabbitmq.waiting("traces") == count)
    return get_all(rabbitmq.settings())


def drain(intake: QueueDrainer) -> bool:
    """Move the intake's messages; return whether the queue of traces had room for them."""
    try:
        intake.drain()
    except ServiceUnavailable as error:
        if "takes no more" not in str(error):
            raise
        return False
    return True


def test_copies_left_by_a_worker_that_dies_before_acknowledging_are_decided_once(
    rabbitmq: RabbitMQ, settings_here: Settings, store: Store, tmp_path: Path
) -> None:
    traces = short_traces(120, seed=2)
    put(settings_here, [json.dumps(trace).encode() for trace in traces])
    worker = launch_worker(settings_here, tmp_path / "dying.log", CRASHING_WORKER, {"CRASH_AT": "moved", "CRASH_AFTER": "2"})
    assert worker.process.wait(PATIENCE_S) == -signal.SIGKILL
    # The worker died before it acknowledged any of the second batch, so all of that is on both queues.
    wait_until(lambda: rabbitmq.waiting("intake") == 20)
    with at_work(settings_here, tmp_path) as (next_worker, client):
        statuses = list(client.as_completed([trace["id"] for trace in traces], timeout_s=PATIENCE_S))
        assert {status.state for status in statuses} == {"decided"}
        wait_until(lambda: rabbitmq.waiting("intake") == rabbitmq.waiting("traces") == 0)
        # The next worker decides at least both copies of the second batch. The first one died before it wrote all its log
        # lines.
        wait_until(lambda: len(next_worker.events("trace_decided")) >= 40)
    assert store.ledger.counts() == (120, 0, 120, 0)


def test_only_the_content_of_a_message_moves(intake: QueueDrainer, settings_here: Settings, rabbitmq: RabbitMQ) -> None:
    headers = {"task": [1], "id": "a", "ignore_result": False, "compression": GZIP, "CC": [rabbitmq.name("dead")], "eta": "now"}
    properties = {"expiration": "3600000", "priority": 9, "reply_to": "x", "message_id": "y", "content_encoding": "utf-16"}
    put(settings_here, [b"\xff{}"], application_headers=headers, **properties)
    put(settings_here, [b""], content_type="text/plain")
    intake.drain()
    first, second = receive(rabbitmq, 2)
    headers_moved = {"task": "?", "id": "a", "ignore_result": False, "compression": GZIP}
    assert first.body == b"\xff{}"
    first.properties["application_headers"].pop(DELIVERY_COUNT, None)
    assert first.properties == {"content_type": "application/json", "application_headers": headers_moved, "delivery_mode": 2}
    assert (second.body, second.properties["content_type"]) == ("", "application/octet-stream")
    assert rabbitmq.waiting("dead") == 1, "the copy that RabbitMQ made when its producer sent it, and no other"
    assert rabbitmq.waiting("intake") == 0


def test_the_beginning_of_a_message_that_is_too_large_moves(
    intake: QueueDrainer, settings_here: Settings, rabbitmq: RabbitMQ
) -> None:
    largest_bytes = largest_body_bytes(settings_here.limits)
    put(settings_here, [b"x" * (largest_bytes + 1), *[b"y" * 700_000] * 3, b"z"])
    intake.drain()
    assert [len(message.body) for message in receive(rabbitmq, 5)] == [BEGINNING_BYTES, *[700_000] * 3, 1]


def test_messages_stay_while_the_queue_is_full(intake: QueueDrainer, settings_here: Settings, rabbitmq: RabbitMQ) -> None:
    bodies = [b"%04d" % number for number in range(50)]
    received: list[bytes] = []
    with limited_by_policy(settings_here, settings_here.queues.first, 10):
        # The policy takes a moment to come into effect.
        def is_full() -> bool:
            put(settings_here, bodies)
            if not drain(intake):
                return True
            received.extend(message.body for message in get_all(settings_here))
            return False

        wait_until(is_full)
    # RabbitMQ accepts some messages beyond the limit before it refuses.
    wait_until(lambda: rabbitmq.waiting("intake") > 0)
    wait_until(lambda: drain(intake) and rabbitmq.waiting("intake") == 0)
    received.extend(message.body for message in get_all(settings_here))
    assert len(received) % 50 == 0
    assert set(received) == set(bodies)


def test_a_message_that_rabbitmq_refuses_is_dead_lettered_and_blocks_no_other(
    intake: QueueDrainer, settings_here: Settings, rabbitmq: RabbitMQ, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # RabbitMQ has a single such limit for all its users, so the test simulates it.
    def refuse(producer: Any, messages: Sequence[Any], *args: Any) -> list[bool]:
        if any(message.body == b"large" for message in messages):
            publish_confirmed(producer, [message for message in messages if message.body < b"large"], *args)
            raise PreconditionFailed("message size 5 is larger than configured max size 4")
        return publish_confirmed(producer, messages, *args)

    monkeypatch.setattr(dead_queue, "publish_confirmed", refuse)
    put(settings_here, [b"first", b"large", b"second"])
    intake.drain()
    assert sorted(message.body for message in receive(rabbitmq, 3)) == [b"first", b"first", b"second"]
    assert rabbitmq.waiting("intake") == 0
    (dead_letter,) = store.dead_letters.read()
    assert (dead_letter.reason, store.dead_letters.payload(dead_letter.letter_id)) == ("malformed", b"large")
    assert "max size 4" in dead_letter.detail


def test_messages_stay_on_the_intake_during_an_outage(
    intake: QueueDrainer, settings_here: Settings, rabbitmq: RabbitMQ, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> list[bool]:
        raise ServiceUnavailable("dead letters: away")

    put(settings_here, [b"1", b"2"])
    with monkeypatch.context() as patch:
        patch.setattr(dead_queue, "publish_confirmed", fail)
        with pytest.raises(ServiceUnavailable):
            intake.drain()
    wait_until(lambda: rabbitmq.waiting("intake") == 2)
    intake.drain()
    assert [message.body for message in receive(rabbitmq, 2)] == [b"1", b"2"]


def test_an_intake_that_is_a_stream_stops_neither_workers_nor_counting(
    rabbitmq: RabbitMQ, settings_here: Settings, tmp_path: Path
) -> None:
    name, ours = intake_name(settings_here.queues.first), with_changed(settings_here, metrics__port=free_port())
    with confirming(settings_here.broker.url) as connection:
        connection.default_channel.queue_declare(name, durable=True, auto_delete=False, arguments={"x-queue-type": "stream"})
    first, second = short_traces(2, seed=4)
    with at_work(ours, tmp_path) as (worker, client):
        assert client.wait(client.submit(first), timeout_s=PATIENCE_S).trace_id == first["id"]
        assert [event["queue"] for event in worker.logged("intake_unusable")] == [name]
        with make_celery(ours) as app, Store.open(ours) as store:
            assert name in look_at_backlog(app, ours, store, ()).submissions
        # After the queue has been deleted, the worker declares it again.
        rabbitmq.delete("intake")
        wait_until(lambda: _is_declared(settings_here))
        put(settings_here, [json.dumps(second).encode()])
        assert client.wait(second["id"], timeout_s=PATIENCE_S).trace_id == second["id"]


def test_an_intake_that_is_exclusive_to_its_producer_stops_neither_workers_nor_counting(
    rabbitmq: RabbitMQ, settings_here: Settings, tmp_path: Path
) -> None:
    name, trace = intake_name(settings_here.queues.first), short_traces(1, seed=4)[0]
    with confirming(settings_here.broker.url) as connection:
        connection.default_channel.queue_declare(name, durable=False, exclusive=True, auto_delete=False)
        with at_work(settings_here, tmp_path) as (worker, client), make_celery(settings_here) as app:
            assert client.wait(client.submit(trace), timeout_s=PATIENCE_S).trace_id == trace["id"]
            assert [event["queue"] for event in worker.logged("intake_unusable")] == [name]
            with Store.open(settings_here) as store:
                assert list(look_at_backlog(app, settings_here, store, ()).submissions) == [settings_here.queues.first]
                wait_until(lambda: [each for report in store.worker_reports() for each in report.failing.values()])
                (failures,) = (report.failing for report in store.worker_reports())
            assert failures.keys() == {"intake_drainer"}
            assert "close the connection that declared it" in failures["intake_drainer"]
            # The queue goes with its connection, and the worker makes it anew.
            connection.release()
            wait_until(lambda: _is_declared(settings_here))


def _is_declared(settings: Settings) -> bool:
    try:
        with confirming(settings.broker.url) as connection:
            connection.default_channel.queue_declare(intake_name(settings.queues.first), passive=True)
    except NotFound:
        return False
    return True


@pytest.mark.parametrize("kind", ["intake", "traces"])
def test_a_deleted_queue_is_declared_anew(intake: QueueDrainer, settings_here: Settings, rabbitmq: RabbitMQ, kind: str) -> None:
    intake.drain()
    rabbitmq.delete(kind)
    put(settings_here, [b"1"])
    intake.drain()
    wait_until(lambda: rabbitmq.waiting("traces") == 1)
