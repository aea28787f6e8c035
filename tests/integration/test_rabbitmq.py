"""RabbitMQ as the broker: quorum queues, confirms, and nothing lost when a queue, a worker or Redis fails."""

import json
import signal
import tracemalloc
from collections import Counter
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
from kp_scorer.broker.dead_queue import DeadQueue
from kp_scorer.broker.publishing import declare_queues, publish_options, send_again, with_producer
from kp_scorer.broker.queues import results_queue, submission_queues
from kp_scorer.broker.results import Publisher
from kp_scorer.broker.task_body import BEGINNING_BYTES, largest_body_bytes
from kp_scorer.broker.task_message import DELIVERY_COUNT, deliveries_by
from kp_scorer.client import Client
from kp_scorer.errors import SettingsError, TraceDead
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.bombs import GZIP, bombs
from tests.support.crashing_worker import KILLS
from tests.support.documents import code_with
from tests.support.outcomes import published
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, SMALL_WORKER, launch_worker, start_worker, wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ, confirming
from tests.support.traces import fresh_samples, short_traces

SLOW = {"EMBED_S": "0.5"}
"""A batch takes half a second to embed."""


def test_decisions_go_to_the_queues_of_their_outcomes(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings()
    payloads = fresh_samples(48)
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER), Client(settings) as client:
        outcomes = Counter(decision["outcome"] for decision in _decided(client, payloads))
    # A worker that has ended has published what it decided.
    assert {outcome: rabbitmq.waiting(outcome) for outcome in outcomes} == outcomes
    with Client(settings) as client:
        _published_as_decided(settings, client, payloads)


def test_deliveries_are_counted_whatever_a_producer_counts(rabbitmq: RabbitMQ) -> None:
    app, queues = make_celery(rabbitmq.settings()), submission_queues(rabbitmq.settings())
    declare_queues(app, queues.in_order)
    with app.connection_for_write() as connection:
        connection.Producer().publish([], routing_key=rabbitmq.name("traces"), headers={DELIVERY_COUNT: 1_000})
    app.close()
    counts = []
    with Connection(rabbitmq.settings().broker.url) as connection:
        for _ in range(3):
            found = wait_until(partial(connection.default_channel.basic_get, rabbitmq.name("traces")))
            message = connection.default_channel.message_to_python(found)
            counts.append(deliveries_by(message))
            message.requeue()
    assert counts == [1, 2, 3]


def test_a_submission_to_a_queue_that_has_gone_makes_it_anew(rabbitmq: RabbitMQ) -> None:
    with Client(rabbitmq.settings()) as client:
        one, two, three = fresh_samples(3)
        client.submit(one)
        rabbitmq.delete("traces")
        client.submit(two)
        wait_until(lambda: rabbitmq.waiting("traces") == 1)
        rabbitmq.delete_exchange()
        client.submit(three)
        wait_until(lambda: rabbitmq.waiting("traces") == 2)


def test_a_submission_makes_no_queue_that_is_there(rabbitmq: RabbitMQ) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, submission_queues(rabbitmq.settings()).in_order)
    # Declaring the queue would be refused.
    with Client(rabbitmq.settings(broker__delivery_limit=7)) as client:
        client.submit(fresh_samples(1)[0])
    wait_until(lambda: rabbitmq.waiting("traces") == 1)


def test_a_message_sent_again_goes_to_no_queue_that_its_producer_named(rabbitmq: RabbitMQ) -> None:
    traces, elsewhere = rabbitmq.name("traces"), rabbitmq.name("accepted")
    queues = submission_queues(rabbitmq.settings())
    with make_celery(rabbitmq.settings()) as app, Connection(rabbitmq.settings().broker.url) as connection:
        declare_queues(app, [*queues.in_order, results_queue(rabbitmq.settings(), "accepted")])
        headers = {"CC": [elsewhere], "BCC": [elsewhere]}
        connection.Producer().publish([], exchange=traces, routing_key=traces, headers=headers)
        found = wait_until(partial(connection.default_channel.basic_get, traces))
        message = connection.default_channel.message_to_python(found)
        assert message.headers["CC"] == [elsewhere]
        send_again(app, queues.traces, message)
        message.ack()
        wait_until(lambda: rabbitmq.waiting("traces") == 1)
    assert rabbitmq.waiting("accepted") == 0


def test_a_results_queue_deleted_under_load_is_made_anew_and_nothing_is_dropped(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    # Without a limit nothing but publishing itself tells that the queue has gone.
    settings = rabbitmq.settings(worker__concurrency=4, queues__results_limit=0)
    traces = short_traces(600, seed=1)
    with Client(settings) as client:
        for trace in traces:
            client.submit(trace)
        with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER, ready=False) as worker:
            wait_until(lambda: rabbitmq.waiting("rejected") > 50)
            rabbitmq.delete("rejected")
            went_with_it = {line["trace_id"] for line in worker.events("trace_decided")}
            assert len(went_with_it) < 500, "too late to tell anything"
            assert len(_decided(client, traces)) == 600
            wait_until(lambda: rabbitmq.waiting("traces") == 0)
    found = {decision["trace_id"] for decision in published(settings)}
    missing = {trace["id"] for trace in traces} - found
    # Those in hand may have been published and not yet logged when the queue went.
    assert len(missing - went_with_it) <= 4


def test_a_worker_has_no_more_in_hand_than_it_works_on(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings(worker__concurrency=4)
    traces = short_traces(30, seed=2)
    with Client(settings) as client:
        ids = [client.submit(trace) for trace in traces]
        with start_worker(settings, tmp_path / "worker.log", command=CRASHING_WORKER, variables=SLOW):
            finished = 0
            while finished < 30:
                waiting = rabbitmq.waiting("traces")
                finished = sum(status is not None and status.state == "decided" for status in client.look_up(ids))
                assert waiting + 4 + finished >= 30


def test_a_trace_that_kills_its_worker_becomes_a_dead_letter(rabbitmq: RabbitMQ, store: Store, tmp_path: Path) -> None:
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
        letters = store.dead_letters
        (letter,) = letters.read()
        assert (letter.reason, letter.trace_id, letter.deliveries) == ("poison", trace_id, 2)
        assert json.loads(letters.payload(letter.letter_id)) == deadly
        assert rabbitmq.waiting("dead") == 0


def test_what_is_no_submission_keeps_its_body_as_a_dead_letter(rabbitmq: RabbitMQ, store: Store) -> None:
    settings = rabbitmq.settings()
    app, letters, queues = make_celery(settings), store.dead_letters, submission_queues(settings)
    assert queues.dead
    declare_queues(app, queues.in_order)
    bodies = [b"\xff\xfe", b"7", b"[[], {}, {}]", b'{"args": 1}', bombs()[GZIP]]
    for body in bodies:
        _publish(app, rabbitmq.name("dead"), body)
    tracemalloc.start()
    DeadQueue(app, queues.dead, letters, Publisher(app, settings, store), settings).drain()
    assert tracemalloc.get_traced_memory()[1] < 2**26, "a message was unpacked"
    tracemalloc.stop()
    assert {letters.payload(letter.letter_id) for letter in letters.read()} == set(bodies)
    app.close()


def test_of_a_message_that_is_too_large_only_the_beginning_takes_memory(
    rabbitmq: RabbitMQ, store: Store, tmp_path: Path
) -> None:
    settings = rabbitmq.settings()
    largest_bytes = largest_body_bytes(settings.limits)
    submission = json.dumps([fresh_samples(1), {}, {}]).encode()
    too_large = [b"x" * 100_000_000, b"[" + b"y" * largest_bytes, submission + b" " * largest_bytes + b"and no JSON"]
    as_large_as_may_be = b"[" + b"z" * (largest_bytes - 1)
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER) as worker, Client(settings) as client:
        with confirming(settings.broker.url) as connection:
            for body in (*too_large, as_large_as_may_be):
                message = amqp.Message(body, content_type="application/json", application_headers={"task": "score_trace"})
                connection.default_channel.basic_publish(message, routing_key=settings.queues.traces)
        assert _decided(client, fresh_samples(1))
        letters = store.dead_letters
        wait_until(lambda: len(list(letters.read())) == 4)
        assert worker.peak_bytes() < 250 * 2**20
    kept = {letters.payload(letter.letter_id): letter.reason for letter in letters.read()}
    assert kept == {**{body[:BEGINNING_BYTES]: "malformed" for body in too_large}, as_large_as_may_be: "invalid"}


def test_killed_workers_lose_nothing(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings()
    traces = short_traces(600, seed=4)
    with Client(settings) as client:
        for trace in traces:
            client.submit(trace)
        for life in range(3):
            with start_worker(settings, tmp_path / f"worker-{life}.log", command=FAST_WORKER, ready=False) as worker:
                wait_until(lambda: len(worker.events("trace_decided")) > 50)
                worker.process.kill()
        assert rabbitmq.waiting("traces"), "killed too late to tell anything"
        with start_worker(settings, tmp_path / "last.log", command=FAST_WORKER):
            assert len(_decided(client, traces)) == 600
            wait_until(lambda: rabbitmq.waiting("traces") == 0)
        _published_as_decided(settings, client, traces)
    assert rabbitmq.waiting("dead") == 0


def test_a_worker_told_to_stop_gives_back_what_it_has_not_begun(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings(worker__concurrency=8)
    traces = short_traces(60, seed=5)
    with Client(settings) as client:
        ids = [client.submit(trace) for trace in traces]
        with start_worker(settings, tmp_path / "worker.log", command=CRASHING_WORKER, variables=SLOW) as worker:
            wait_until(lambda: worker.events("trace_decided"))
            worker.process.terminate()
            assert worker.process.wait(30) == 0
        decided = sum(status is not None and status.state == "decided" for status in client.look_up(ids))
        assert 0 < decided < 60
        # What it finished last may not have been acknowledged.
        wait_until(lambda: rabbitmq.waiting("traces") >= 60 - decided)
        with start_worker(settings, tmp_path / "next.log", command=FAST_WORKER):
            assert len(_decided(client, traces)) == 60
            wait_until(lambda: rabbitmq.waiting("traces") == 0)
        _published_as_decided(settings, client, traces)


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


def test_a_worker_refuses_a_queue_with_other_arguments(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    app = make_celery(rabbitmq.settings())
    declare_queues(app, submission_queues(rabbitmq.settings()).in_order)
    app.close()
    changed = rabbitmq.settings(broker__delivery_limit=7)
    worker = launch_worker(changed, tmp_path / "worker.log", FAST_WORKER)
    assert worker.process.wait(60) == SettingsError.exit_code
    (line,) = worker.events("worker_cannot_start")
    assert "x-delivery-limit" in line["detail"]


def test_a_worker_refuses_a_results_queue_with_another_limit(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, [results_queue(rabbitmq.settings(), "accepted")])
    changed = rabbitmq.settings(queues__results_limit=7)
    worker = launch_worker(changed, tmp_path / "worker.log", FAST_WORKER)
    assert worker.process.wait(60) == SettingsError.exit_code
    (line,) = worker.events("worker_cannot_start")
    assert "x-max-length" in line["detail"]
    assert rabbitmq.name("accepted") in line["detail"]


def test_a_worker_that_publishes_no_rejected_decisions_needs_no_queue_for_them(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, [results_queue(rabbitmq.settings(), "rejected")])
    changed = rabbitmq.settings(queues__results_limit=7, queues__rejected_when_full="none")
    with start_worker(changed, tmp_path / "worker.log", command=FAST_WORKER), Client(changed) as client:
        assert _decided(client, short_traces(1, seed=6))


def test_any_celery_app_can_submit_as_the_documents_say(rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    ours = make_celery(settings)
    declare_queues(ours, submission_queues(settings).in_order)
    ours.close()
    app = Celery("foreign", broker=settings.broker.url, set_as_current=False)
    (trace,) = fresh_samples(1)
    code = code_with("declare=[]").replace('"traces"', repr(rabbitmq.name("traces")))
    exec(code, {"app": app, "trace": trace})
    app.close()
    wait_until(lambda: rabbitmq.waiting("traces") == 1)


def _publish(app: Celery, queue: str, body: bytes) -> None:
    def publish(producer: Any) -> None:
        producer.publish(
            body,
            routing_key=queue,
            content_type="application/json",
            content_encoding="utf-8",
            # Which most are not: decompressing those fails.
            headers={"compression": GZIP},
            **publish_options(app),
        )

    with_producer(app, "test", publish)


def _decided(client: Client, payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Submit what was not yet submitted, and wait for the decisions of all."""
    ids = [str(payload["id"]) for payload in payloads]
    for payload, known in zip(payloads, client.look_up(ids), strict=True):
        if known is None:
            client.submit(payload)
    statuses = list(client.as_settled(ids, timeout_s=120))
    assert len(statuses) == len(ids), f"{len(ids) - len(statuses)} still pending"
    return [status.decision.model_dump(mode="json") for status in statuses if status.decision]


def _published_as_decided(settings: Settings, client: Client, payloads: Sequence[dict[str, Any]]) -> None:
    standing = {decision["trace_id"]: decision for decision in _decided(client, payloads)}
    found: dict[str, dict[str, Any]] = {}
    for decision in published(settings):
        assert decision == standing[decision["trace_id"]]
        found[decision["trace_id"]] = decision
    assert found.keys() == standing.keys()
