"""With RabbitMQ as the broker nothing is lost when a queue, a worker or Redis fails, thanks to quorum queues and confirms."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from kp_scorer.broker.calls import declare_queues
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.dead_queue import QueueDrainer
from kp_scorer.broker.queues import results_queue
from kp_scorer.broker.wire import BEGINNING_BYTES, largest_body_bytes
from kp_scorer.client import Client
from kp_scorer.errors import SettingsError
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store

from tests.support.attacks import GZIP, bombs
from tests.support.builders import first_queues
from tests.support.calls import traced_memory
from tests.support.processes import (
    PATIENCE_S,
    SMALL_WORKER,
    at_work,
    output_of,
    wait_until,
)
from tests.support.rabbitmq import (
    LARGEST_BYTES,
    RabbitMQ,
    confirming,
    declare_as_worker,
    queues_limited,
)
from tests.support.traces import fresh_samples, short_traces


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
        declare_queues(app, first_queues(rabbitmq.settings()).in_order)
    # The queue is made with other arguments here, so a client that declared it would be refused.
    with confirming(rabbitmq.settings().broker.url) as connection:
        connection.default_channel.queue_delete(rabbitmq.name("traces"))
        connection.default_channel.queue_declare(rabbitmq.name("traces"), durable=True, auto_delete=False)
        connection.default_channel.queue_bind(rabbitmq.name("traces"), rabbitmq.name("traces"), rabbitmq.name("traces"))
    with Client(rabbitmq.settings()) as client:
        client.submit(fresh_samples(1)[0])
    wait_until(lambda: rabbitmq.waiting("traces") == 1)


def test_a_worker_has_no_more_in_flight_than_its_bytes_allow(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    settings = rabbitmq.settings()
    constants = f"WorkerSettings.in_flight_bytes={4 * largest_body_bytes(settings.limits)}"
    traces = short_traces(16, seed=2)
    with Client(settings) as client:
        ids = [client.submit(trace) for trace in traces]
        with at_work(settings, tmp_path, variables={"EMBED_S": "0.2", "CONSTANTS": constants}):
            finished = 0
            while finished < 16:
                waiting = rabbitmq.waiting("traces")
                finished = sum(status is not None and status.state == "decided" for status in client.look_up(ids))
                assert waiting + 4 + finished >= 16


def test_the_dead_queue_returns_every_message_as_it_came(rabbitmq: RabbitMQ, store: Store) -> None:
    settings = rabbitmq.settings()
    queues = first_queues(settings)
    assert queues.dead
    bodies = [b"\xff\xfe", b"7", b"[[], {}, {}]", b'{"args": 1}', bombs()[GZIP]]
    with make_celery(settings) as app:
        declare_queues(app, queues.in_order)
        # Most of these bodies are not compressed, so that decompressing them fails.
        rabbitmq.send("dead", *bodies, application_headers={"compression": GZIP})
        with traced_memory() as memory:
            QueueDrainer(app, queues.dead, queues, store).drain()
        assert memory.peak_bytes < 2**26, "a message was unpacked"
    with confirming(settings.broker.url) as connection:
        get = partial(connection.default_channel.basic_get, settings.queues.first, no_ack=True)
        assert {bytes(wait_until(get).body) for _ in bodies} == set(bodies)


def test_a_worker_holds_only_the_beginning_of_a_message_that_is_too_large(
    rabbitmq: RabbitMQ, store: Store, tmp_path: Path
) -> None:
    settings = rabbitmq.settings()
    largest_bytes = largest_body_bytes(settings.limits)
    submission = json.dumps([fresh_samples(1), {}, {}]).encode()
    too_large = [each * LARGEST_BYTES for each in (b"u", b"v", b"w")]
    too_large += [b"[" + b"y" * largest_bytes, submission + b" " * largest_bytes + b"and no JSON"]
    as_large_as_may_be = b"[" + b"z" * (largest_bytes - 1)
    with at_work(settings, tmp_path, command=SMALL_WORKER) as (worker, client):
        rabbitmq.send("traces", *too_large, as_large_as_may_be, application_headers={"task": "score_trace"})
        client.wait(client.submit(fresh_samples(1)[0]), timeout_s=PATIENCE_S)
        wait_until(lambda: len(_dead_letters(store)) == 6)
        assert worker.peak_bytes() < 130 * 2**20
    assert _dead_letters(store) == {
        **{body[:BEGINNING_BYTES]: "malformed" for body in too_large},
        as_large_as_may_be: "invalid",
    }


def test_a_message_that_expires_is_decided_whatever_a_producer_claims(rabbitmq: RabbitMQ, store: Store, tmp_path: Path) -> None:
    settings = rabbitmq.settings()
    traces = fresh_samples(3)
    claims = [{}, {"x-death": [{"reason": "delivery_limit", "queue": "traces", "count": 20}]}, {"x-death": "delivery_limit"}]
    with make_celery(settings) as app:
        declare_queues(app, first_queues(settings).in_order)
    for trace, headers in zip(traces, claims, strict=True):
        rabbitmq.send("traces", json.dumps(trace).encode(), application_headers=headers, expiration="1")
    wait_until(lambda: rabbitmq.waiting("dead") == len(traces))
    with at_work(settings, tmp_path) as (_, client):
        statuses = list(client.as_completed([trace["id"] for trace in traces], timeout_s=PATIENCE_S))
    assert [status.state for status in statuses] == ["decided"] * len(traces)
    assert list(store.dead_letters.read()) == []
    assert rabbitmq.waiting("dead") == 0


@pytest.mark.parametrize("kind", ["traces", "accepted"])
def test_rabbitmq_drops_no_message_that_was_requeued_many_times(kind: str, rabbitmq: RabbitMQ) -> None:
    settings = rabbitmq.settings()
    queues = first_queues(settings)
    queue = {"traces": queues.traces, "dead": queues.dead}.get(kind) or results_queue(settings, kind)  # type: ignore[arg-type]
    # From RabbitMQ 4.0 on, a quorum queue without its own limit drops a message that has been requeued 20 times.
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
        ({"queues__results_limit": 7}, "x-max-length", "accepted"),
        ({"results__with_trace": True}, "x-max-length-bytes", "accepted"),
    ],
)
def test_a_worker_refuses_a_queue_with_other_arguments(
    changed: dict[str, int], argument: str, kind: str, rabbitmq: RabbitMQ
) -> None:
    declare_as_worker(rabbitmq.settings())
    with pytest.raises(SettingsError, match=argument) as refused:
        declare_as_worker(rabbitmq.settings(**changed))
    assert rabbitmq.name(kind) in str(refused.value)


def test_a_limit_of_the_virtual_host_is_named_as_that(rabbitmq: RabbitMQ) -> None:
    with queues_limited(rabbitmq.settings(), 0):
        with pytest.raises(SettingsError, match="limit") as refused:
            declare_as_worker(rabbitmq.settings())
        assert "raise the limit of the virtual host" in str(refused.value)


FORKING: Final = """
import json, os, sys
from kp_scorer import Client

first, *traces, last = map(json.loads, sys.argv[1:])
with Client.connect() as client:
    client.submit(first)
    children = []
    for trace in traces:
        if not (child := os.fork()):
            try:
                client.submit(trace)
                print("submitted", flush=True)
            finally:
                # As a child of multiprocessing ends; and one that ends as usual must leave the connection to its parent.
                os._exit(0) if trace is traces[0] else sys.exit()
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    client.submit(last)
"""


def test_each_child_of_a_client_submits_on_a_connection_of_its_own(rabbitmq: RabbitMQ) -> None:
    traces = [json.dumps(trace) for trace in fresh_samples(6)]
    done = output_of(sys.executable, "-c", FORKING, *traces, env=os.environ | as_environment(rabbitmq.settings()), timeout=120)
    assert done.split() == ["submitted"] * 4
    wait_until(lambda: rabbitmq.waiting("traces") == 6)


def test_a_worker_that_publishes_no_rejected_decisions_needs_no_queue_for_them(rabbitmq: RabbitMQ) -> None:
    with make_celery(rabbitmq.settings()) as app:
        declare_queues(app, [results_queue(rabbitmq.settings(), "rejected")])
    declare_as_worker(rabbitmq.settings(queues__results_limit=7, results__publish=["accepted", "review"]))


def _dead_letters(store: Store) -> dict[bytes, str]:
    """Return the reason of each dead letter, by payload."""
    return {store.dead_letters.payload(each.letter_id): each.reason for each in store.dead_letters.read()}
