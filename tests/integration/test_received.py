"""Why a trace was slow, and who decided it: what decisions, dead letters and log lines say of worker, wait and deliveries."""

import json
import time
from pathlib import Path
from typing import Any

import amqp
import pytest
import redis
from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment

from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.processes import CRASHING_WORKER, FAST_WORKER, start_worker, wait_until
from tests.support.rabbitmq import RabbitMQ, confirming
from tests.support.traces import fresh_samples


def explained(settings: Settings, trace_id: str) -> str:
    return " ".join(CliRunner(env=as_environment(settings)).invoke(commands, ["explain", trace_id]).output.split())


def test_a_decision_names_its_worker_its_wait_and_its_deliveries(on_broker: SettingsWith, store: Store, tmp_path: Path) -> None:
    settings, (trace,) = on_broker(), fresh_samples(1)
    with Client(settings) as client, start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        decision = client.wait(client.submit(trace), timeout_s=30)
        (report,) = wait_until(store.worker_reports)
        (line,) = wait_until(lambda: worker.events("trace_decided"))
    received = decision.received
    assert received
    assert (received.worker, received.deliveries) == (report.node, 1)
    assert received.queued_ms is not None
    assert 0 <= received.queued_ms < 30_000
    assert decision.timings.held_ms is not None
    assert {name: line[name] for name in received.model_dump()} == received.model_dump()
    words = explained(settings, trace["id"])
    assert (
        f"{report.node} decided it at {decision.decided_at}, at delivery 1: queued {received.queued_ms / 1_000:.3f} s" in words
    )
    (row,) = (json.loads(decision.model_dump_json()),)
    assert Decision.model_validate(row | {"received": None}).model_dump().keys() == row.keys() - {"received"}


def test_a_redelivery_is_counted(settings: Settings, store: Store, tmp_path: Path) -> None:
    settings, (trace,) = with_changed(settings, broker__visibility_timeout_s=3), fresh_samples(1)
    with Client(settings) as client:
        client.submit(trace)
        dying = {"CRASH_AT": "embedding", "CRASH_AFTER": "1"}
        with start_worker(settings, tmp_path / "dying.log", command=CRASHING_WORKER, variables=dying, ready=False) as worker:
            assert worker.process.wait(60) == -9
        with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER):
            decision = client.wait(trace["id"], timeout_s=60)
    assert decision.received
    assert decision.received.deliveries == 2


def test_a_dead_letter_names_the_worker_and_the_wait_where_somebody_says_it(
    settings: Settings, redis_client: redis.Redis, store: Store, tmp_path: Path
) -> None:
    envelope: dict[str, Any] = {
        "body": json.dumps([[{"id": "kp:trace:sent"}], {}, None]),
        "content-type": "application/json",
        "headers": {"task": "score_trace", "id": "1", "sent_ms": int(time.time() * 1_000) - 5_000},
        "properties": {},
    }
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        redis_client.lpush("traces", json.dumps({"id": "kp:trace:plain"}), json.dumps(envelope))
        wait_until(lambda: len(list(store.dead_letters.read())) == 2)
        letters = {each.trace_id: each for each in store.dead_letters.read()}
        (report,) = wait_until(store.worker_reports)
        lines = {line["trace_id"]: line for line in worker.events("trace_dead")}
    assert {each.worker for each in letters.values()} == {line["worker"] for line in lines.values()} == {report.node}
    assert letters["kp:trace:plain"].queued_ms is None
    assert "queued_ms" not in lines["kp:trace:plain"]
    queued_ms = letters["kp:trace:sent"].queued_ms
    assert queued_ms is not None
    assert 5_000 <= queued_ms == lines["kp:trace:sent"]["queued_ms"] < 30_000
    listed = CliRunner(env=as_environment(settings)).invoke(commands, ["dead-letter", "list"]).stdout
    rows = {row["trace_id"]: row for row in map(json.loads, listed.splitlines())}
    assert rows["kp:trace:sent"]["queued_ms"] == queued_ms
    assert "queued_ms" not in rows["kp:trace:plain"]
    words = explained(settings, "kp:trace:sent")
    assert f"by {report.node}, at delivery 1, queued for {queued_ms / 1_000:.3f} s:" in words


@pytest.mark.parametrize(
    ("stamp", "is_known"),
    [
        ({"timestamp": 100}, True),
        ({"timestamp": 3, "application_headers": {"timestamp_in_ms": 100_000}}, True),
        ({}, False),
        # In milliseconds, as some producers write it.
        ({"timestamp": -(10**12)}, False),
    ],
)
def test_rabbitmq_or_a_producer_may_have_stamped_a_message(
    stamp: dict[str, Any], is_known: bool, rabbitmq: RabbitMQ, tmp_path: Path
) -> None:
    settings = rabbitmq.settings()
    direct, moved = (json.dumps(trace).encode() for trace in fresh_samples(2))
    now_s = int(time.time())
    properties = {"content_type": "application/json"} | stamp
    if "timestamp" in stamp:
        properties["timestamp"] = now_s - stamp["timestamp"]
    if headers := stamp.get("application_headers"):
        properties["application_headers"] = {name: now_s * 1_000 - ago_ms for name, ago_ms in headers.items()}
    traces, intake = settings.queues.traces, settings.queues.intake_name
    with start_worker(settings, tmp_path / "worker.log", command=FAST_WORKER), Client(settings) as client:
        with confirming(settings.broker.url) as connection:
            publish = connection.default_channel.basic_publish
            publish(amqp.Message(direct, **properties), exchange=traces, routing_key=traces, mandatory=True)
            publish(amqp.Message(moved, **properties), exchange="", routing_key=intake, mandatory=True)
        for body in (direct, moved):
            received = client.wait(json.loads(body)["id"], timeout_s=30).received
            assert received
            assert (received.queued_ms is not None) == is_known
            assert 100_000 <= (received.queued_ms or 100_000) < 160_000
