"""RabbitMQ as the broker: quorum queues, confirms, and nothing lost when a queue, a worker or Redis fails."""

import json
import signal
import tracemalloc
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import amqp
import pytest
from celery import Celery
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.dead_letters import SideQueue
from kp_scorer.broker.publishing import declare_queues, send_again
from kp_scorer.broker.queues import results_queue, submission_queues
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.wire import BEGINNING_BYTES, DELIVERY_COUNT, deliveries_by, largest_body_bytes
from kp_scorer.client import Client
from kp_scorer.decoding import Limits
from kp_scorer.errors import SettingsError, TraceDead
from kp_scorer.ledger import Store

from tests.support.attacks import GZIP, bombs
from tests.support.crashing_worker import KILLS
from tests.support.documents import code_with
from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, SMALL_WORKER, launch_worker, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ, confirming
from tests.support.traces import fresh_samples, short_traces

SLOW = {"EMBED_S": "0.5"}
"""A batch takes half a second to embed."""


def test_deliveries_are_counted_whatever_a_producer_counts(rabbitmq: RabbitMQ) -> None:
    app, queues = make_celery(rabbitmq.settings()), submission_queues(rabbitmq.settings())
    declare_queues(app, queues.in_order)
    with app.connection_for_write() as connection:
        connection.Producer().publish([], routing_key=rabbitmq.name("traces"), headers={DELIVERY_COUNT: 1_000})
    app.close()
    counts = []
    with Connection(rabbitmq.settings().broker.url) as connection:
        for _ in range(3):
            message = _receive(connection, rabbitmq.name("traces"))
            counts.append(deliveries_by(message))
            message.requeue()
    assert counts == [1, 2, 3]


def test_a_submission_declares_a_deleted_queue_anew(rabbitmq: RabbitMQ) -> None:
    with Client(rabbitmq.settings()) as client:
        traces = fresh_samples(3)
        client.submit(traces[0])
        rabbitmq.delete("traces")
        client.submit(traces[1])
        wait_until(lambda: rabbitmq.waiting("traces") == 1)
        rabbitmq.delete_exchange()
        client.submit(traces[2])
        wait_until(lambda: rabbitmq.waiting("traces") == 2)


def test_a_submission_declares_no_existing_queue(rabbitmq: RabbitMQ) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, submission_queues(rabbitmq.settings()).in_order)
    # Declaring the queue would be refused.
    with Client(rabbitmq.settings(broker__delivery_limit=7)) as client:
        client.submit(fresh_samples(1)[0])
    wait_until(lambda: rabbitmq.waiting("traces") == 1)


def test_a_resent_message_ignores_the_queues_that_its_producer_names(rabbitmq: RabbitMQ) -> None:
    traces, elsewhere = rabbitmq.name("traces"), rabbitmq.name("accepted")
    queues = submission_queues(rabbitmq.settings())
    with make_celery(rabbitmq.settings()) as app, Connection(rabbitmq.settings().broker.url) as connection:
        declare_queues(app, [*queues.in_order, results_queue(rabbitmq.settings(), "accepted")])
        headers = {"CC": [elsewhere], "BCC": [elsewhere]}
        connection.Producer().publish([], exchange=traces, routing_key=traces, headers=headers)
        message = _receive(connection, traces)
        assert message.headers["CC"] == [elsewhere]
        send_again(app, queues.traces, message)
        message.ack()
        wait_until(lambda: rabbitmq.waiting("traces") == 1)
    assert rabbitmq.waiting("accepted") == 0


def test_a_results_queue_deleted_under_load_is_declared_anew(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    # Without a limit nothing but publishing itself shows that the queue is gone.
    settings = rabbitmq.settings(worker__concurrency=4, queues__results_limit=0)
    traces = short_traces(600, seed=1)
    with Client(settings) as client:
        for trace in traces:
            client.submit(trace)
        with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER, ready=False) as worker:
            wait_until(lambda: rabbitmq.waiting("rejected") > 50)
            rabbitmq.delete("rejected")
            deleted_with_it = {line["trace_id"] for line in worker.events("trace_decided")}
            assert len(deleted_with_it) < 500, "too late to show anything"
            assert len(_decided(client, traces)) == 600
            wait_until(lambda: rabbitmq.waiting("traces") == 0)
    missing = {trace["id"] for trace in traces} - {decision["trace_id"] for decision in published(settings)}
    # Those in flight may have been published and not yet logged when the queue was deleted.
    assert len(missing - deleted_with_it) <= 4


@pytest.mark.parametrize("changed", [{"worker__concurrency": 4}, {"worker__in_flight_bytes": 4 * largest_body_bytes(Limits())}])
def test_a_worker_has_no_more_in_flight_than_its_settings_allow(
    changed: dict[str, int], rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    settings = rabbitmq.settings(**changed)
    traces = short_traces(16, seed=2)
    with Client(settings) as client:
        ids = [client.submit(trace) for trace in traces]
        with start_worker(settings, tmp_path / "worker.log", command=CRASHING_WORKER, variables=SLOW):
            finished = 0
            while finished < 16:
                waiting = rabbitmq.waiting("traces")
                finished = sum(status is not None and status.state == "decided" for status in client.look_up(ids))
                assert waiting + 4 + finished >= 16


def test_a_trace_that_kills_its_workers_becomes_a_dead_letter(rabbitmq: RabbitMQ, store: Store, tmp_path: Path) -> None:
    settings = rabbitmq.settings(broker__delivery_limit=2)
    (deadly,) = short_traces(1, seed=3)
    deadly["task"] = {"objective": KILLS}
    with Client(settings) as client:
        trace_id = client.submit(deadly)
        for life in range(2):
            worker = launch_worker(settings, tmp_path / f"worker-{life}.log", CRASHING_WORKER)
            assert worker.process.wait(60) == -signal.SIGKILL
        wait_until(lambda: rabbitmq.waiting("dead") == 1)
        with start_worker(settings, tmp_path / "worker.log", command=CRASHING_WORKER):
            with pytest.raises(TraceDead, match="delivered 2 times"):
                client.wait(trace_id, timeout_s=30)
            assert _decided(client, fresh_samples(3))
        (dead_letter,) = store.dead_letters.read()
        assert (dead_letter.reason, dead_letter.trace_id, dead_letter.deliveries) == ("poison", trace_id, 2)
        assert json.loads(store.dead_letters.payload(dead_letter.letter_id)) == deadly
        assert rabbitmq.waiting("dead") == 0


def test_a_dead_letter_keeps_a_body_that_is_no_submission(rabbitmq: RabbitMQ, store: Store) -> None:
    settings = rabbitmq.settings()
    queues = submission_queues(settings)
    assert queues.dead
    bodies = [b"\xff\xfe", b"7", b"[[], {}, {}]", b'{"args": 1}', bombs()[GZIP]]
    with make_celery(settings) as app, confirming(settings.broker.url) as connection:
        declare_queues(app, queues.in_order)
        for body in bodies:
            # Most are not compressed: decompressing those fails.
            message = amqp.Message(body, content_type="application/json", application_headers={"compression": GZIP})
            connection.default_channel.basic_publish(message, routing_key=rabbitmq.name("dead"))
        tracemalloc.start()
        SideQueue(app, queues.dead, settings, store.dead_letters, Publisher(app, settings, store)).drain()
        assert tracemalloc.get_traced_memory()[1] < 2**26, "a message was unpacked"
        tracemalloc.stop()
    assert set(_dead_letters(store)) == set(bodies)


def test_a_worker_holds_only_the_beginning_of_a_message_that_is_too_large(
    rabbitmq: RabbitMQ, store: Store, tmp_path: Path
) -> None:
    settings = rabbitmq.settings()
    largest_bytes = largest_body_bytes(settings.limits)
    submission = json.dumps([fresh_samples(1), {}, {}]).encode()
    too_large = [b"x" * 40_000_000, b"[" + b"y" * largest_bytes, submission + b" " * largest_bytes + b"and no JSON"]
    as_large_as_may_be = b"[" + b"z" * (largest_bytes - 1)
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER) as worker, Client(settings) as client:
        with confirming(settings.broker.url) as connection:
            for body in (*too_large, as_large_as_may_be):
                message = amqp.Message(body, content_type="application/json", application_headers={"task": "score_trace"})
                connection.default_channel.basic_publish(message, routing_key=settings.queues.traces)
        assert _decided(client, fresh_samples(1))
        wait_until(lambda: len(_dead_letters(store)) == 4)
        assert worker.peak_bytes() < 130 * 2**20
    assert _dead_letters(store) == {
        **{body[:BEGINNING_BYTES]: "malformed" for body in too_large},
        as_large_as_may_be: "invalid",
    }


def test_an_outage_of_redis_makes_no_dead_letters(rabbitmq: RabbitMQ, redis_url: str, tmp_path: Path) -> None:
    traces = fresh_samples(3)
    with ExitStack() as opened:
        network = opened.enter_context(Proxy(redis_url))
        settings = rabbitmq.settings(broker__delivery_limit=1, redis__url=network.url)
        worker = opened.enter_context(start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER))
        client = opened.enter_context(Client(settings))
        foreign = opened.enter_context(make_celery(rabbitmq.settings(broker__delivery_limit=1)))
        network.refuse()
        for trace in traces:
            foreign.send_task("score_trace", args=[trace], queue=rabbitmq.name("traces"))
        wait_until(lambda: len(worker.events("trace_waits")) >= len(traces))
        network.accept()
        assert len(_decided(client, traces)) == 3
        # Theirs and ours, which repeat them.
        wait_until(lambda: len(worker.events("trace_decided")) == 6)
    assert rabbitmq.waiting("dead") == 0


@pytest.mark.parametrize("x_death", [None, [{"reason": "delivery_limit", "queue": "traces", "count": 20}], "delivery_limit"])
def test_a_message_that_expires_is_decided_whatever_a_producer_claims(
    x_death: Any, rabbitmq: RabbitMQ, store: Store, tmp_path: Path
) -> None:
    settings = rabbitmq.settings()
    traces = fresh_samples(5)
    with make_celery(settings) as app:
        declare_queues(app, submission_queues(settings).in_order)
    with confirming(settings.broker.url) as connection:
        for trace in traces:
            message = amqp.Message(
                json.dumps(trace),
                content_type="application/json",
                application_headers={} if x_death is None else {"x-death": x_death},
                expiration="1",
            )
            connection.default_channel.basic_publish(message, routing_key=settings.queues.traces)
    wait_until(lambda: rabbitmq.waiting("dead") == len(traces))
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER), Client(settings) as client:
        statuses = list(client.as_completed([trace["id"] for trace in traces], timeout_s=30))
    assert [status.state for status in statuses] == ["decided"] * len(traces)
    assert list(store.dead_letters.read()) == []
    assert rabbitmq.waiting("dead") == 0


@pytest.mark.parametrize("kind", ["dead", "accepted"])
def test_messages_are_requeued_any_number_of_times_where_only_readers_requeue_them(kind: str, rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    queue = submission_queues(settings).dead if kind == "dead" else results_queue(settings, "accepted")
    assert queue
    # From RabbitMQ 4.0 on a quorum queue without a limit of its own drops a message that was requeued 20 times.
    assert queue.queue_arguments["x-delivery-limit"] >= 1_000_000
    with make_celery(settings) as app, confirming(settings.broker.url) as connection:
        declare_queues(app, [queue])
        connection.Producer().publish({}, routing_key=queue.name)
        for _ in range(25):
            wait_until(partial(connection.default_channel.basic_get, queue.name))
            connection.default_channel.basic_recover(requeue=True)
        assert wait_until(partial(connection.default_channel.basic_get, queue.name, no_ack=True))


@pytest.mark.parametrize(
    ("changed", "argument", "kind"),
    [
        ({"broker__delivery_limit": 7}, "x-delivery-limit", "traces"),
        ({"queues__results_limit": 7}, "x-max-length", "accepted"),
    ],
)
def test_a_worker_refuses_a_queue_with_other_arguments(
    changed: dict[str, int], argument: str, kind: str, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, [*submission_queues(rabbitmq.settings()).in_order, results_queue(rabbitmq.settings(), "accepted")])
    worker = launch_worker(rabbitmq.settings(**changed), tmp_path / "worker.log", FAST_WORKER)
    assert worker.process.wait(60) == SettingsError.exit_code
    (line,) = worker.events("worker_cannot_start")
    assert argument in line["detail"]
    assert rabbitmq.name(kind) in line["detail"]


def test_a_worker_that_publishes_no_rejected_decisions_needs_no_queue_for_them(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, [results_queue(rabbitmq.settings(), "rejected")])
    changed = rabbitmq.settings(queues__results_limit=7, results__rejected_via="none")
    with start_worker(changed, tmp_path / "worker.log", command=FAST_WORKER), Client(changed) as client:
        assert _decided(client, short_traces(1, seed=6))


def test_any_celery_app_can_submit_as_the_documents_say(rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    with make_celery(settings) as ours:
        declare_queues(ours, submission_queues(settings).in_order)
    app = Celery("foreign", broker=settings.broker.url, set_as_current=False)
    (trace,) = fresh_samples(1)
    code = code_with("declare=[]").replace('"traces"', repr(rabbitmq.name("traces")))
    exec(code, {"app": app, "trace": trace})
    app.close()
    wait_until(lambda: rabbitmq.waiting("traces") == 1)


def _receive(connection: Connection, queue: str) -> Any:
    channel = connection.default_channel
    return channel.message_to_python(wait_until(partial(channel.basic_get, queue)))


def _dead_letters(store: Store) -> dict[bytes, str]:
    """Reasons by payload."""
    return {store.dead_letters.payload(each.letter_id): each.reason for each in store.dead_letters.read()}


def _decided(client: Client, payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Submit what was not yet submitted, and wait for the decisions of all."""
    ids = [str(payload["id"]) for payload in payloads]
    for payload, status in zip(payloads, client.look_up(ids), strict=True):
        if status is None:
            client.submit(payload)
    statuses = list(client.as_completed(ids, timeout_s=120))
    assert len(statuses) == len(ids), f"{len(ids) - len(statuses)} still pending"
    return [status.decision.model_dump(mode="json") for status in statuses if status.decision]
