"""Decisions, dead letters and log lines name the worker that decided a trace, how long it waited, and its deliveries."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.commands import command
from tests.support.processes import PATIENCE_S, at_work, free_port, wait_until
from tests.support.prometheus import scraped
from tests.support.rabbitmq import RabbitMQ
from tests.support.traces import fresh_samples, rows_in


def explained(settings: Settings, trace_id: str) -> str:
    return " ".join(command(settings, "explain", trace_id).output.split())


def test_a_decision_names_its_worker_its_wait_and_its_deliveries(on_broker: SettingsWith, store: Store, tmp_path: Path) -> None:
    settings, (trace,) = on_broker(), fresh_samples(1)
    with Client(settings) as client, make_celery(settings) as app, app.connection_for_read() as connection:
        client.submit(trace)
        # Simulate that the trace has ended a worker.
        delivered = wait_until(lambda: connection.default_channel.basic_get(settings.queues.first))
        connection.default_channel.basic_reject(delivered.delivery_tag, requeue=True)
    with at_work(settings, tmp_path) as (worker, client):
        decision = client.wait(trace["id"], timeout_s=PATIENCE_S)
        (report,) = wait_until(store.worker_reports)
        (line,) = wait_until(lambda: worker.events("trace_decided"))
    received = decision.received
    assert received
    assert (received.worker, received.deliveries) == (report.node, 2)
    assert received.queued_ms is not None
    assert 0 <= received.queued_ms < 30_000
    assert decision.timings.held_ms is not None
    assert {name: line[name] for name in received.model_dump()} == received.model_dump()
    assert (line["trace_id"], line["domain"], line["outcome"]) == (decision.trace_id, decision.domain, decision.outcome)
    assert line["score"] == pytest.approx(decision.score, abs=1e-6)
    assert line["duration_ms"] > 0
    words = explained(settings, trace["id"])
    assert (
        f"{report.node} decided it at {decision.decided_at}, at delivery 2: queued {received.queued_ms / 1_000:.3f} s" in words
    )
    (row,) = (json.loads(decision.model_dump_json()),)
    assert Decision.model_validate(row | {"received": None}).model_dump().keys() == row.keys() - {"received"}


@pytest.mark.parametrize("logged", ["accepted", "none"])
def test_decisions_that_are_not_logged_are_counted_and_dead_letters_are_logged(
    settings: Settings, redis_client: redis.Redis, logged: str, tmp_path: Path
) -> None:
    chosen = with_changed(settings, log__decisions=logged, metrics__port=free_port(), scoring__threshold=0.6)
    traces = fresh_samples(10)
    with at_work(chosen, tmp_path) as (worker, client):
        client.submit_many(traces)
        statuses = list(client.as_completed([str(trace["id"]) for trace in traces], timeout_s=PATIENCE_S))
        accepted = {each.trace_id for each in statuses if each.decision and each.decision.outcome == "accepted"}
        assert 0 < len(accepted) < 10
        redis_client.lpush("traces", json.dumps({"id": "kp:trace:plain"}))
        wait_until(lambda: worker.events("trace_dead"))
        counted = "kp_scorer_processing_seconds_count"
        wait_until(lambda: scraped(chosen)[counted] == 10)
    lines = worker.events("trace_decided")
    assert {line["trace_id"] for line in lines} == (accepted if logged == "accepted" else set())


def test_a_worker_has_enough_in_flight_to_fill_the_passes_of_its_engine(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    changed = with_changed(settings, worker__concurrency=4)
    with at_work(changed, tmp_path, variables={"EMBED_S": "2", "PASS_TEXTS": "10"}) as (_, client):
        client.submit_many(fresh_samples(60), timeout_s=PATIENCE_S)
        wait_until(lambda: [report.in_flight for report in store.worker_reports()] == [30])


def test_a_dead_letter_names_its_worker_and_its_wait_if_known(
    settings: Settings, redis_client: redis.Redis, store: Store, tmp_path: Path
) -> None:
    envelope: dict[str, Any] = {
        "body": json.dumps([[{"id": "kp:trace:sent"}], {}, None]),
        "content-type": "application/json",
        "headers": {"task": "score_trace", "id": "1", "sent_ms": int(time.time() * 1_000) - 5_000},
        "properties": {},
    }
    with at_work(settings, tmp_path) as (worker, _):
        redis_client.lpush("traces", json.dumps({"id": "kp:trace:plain"}), json.dumps(envelope))
        wait_until(lambda: len(list(store.dead_letters.read())) == 2)
        letters = {each.trace_id: each for each in store.dead_letters.read()}
        (report,) = wait_until(store.worker_reports)
        lines = {line["trace_id"]: line for line in worker.logged("trace_dead", 2)}
    assert {each.worker for each in letters.values()} == {line["worker"] for line in lines.values()} == {report.node}
    assert letters["kp:trace:plain"].queued_ms is None
    assert "queued_ms" not in lines["kp:trace:plain"]
    queued_ms = letters["kp:trace:sent"].queued_ms
    assert queued_ms is not None
    assert 5_000 <= queued_ms == lines["kp:trace:sent"]["queued_ms"] < 30_000
    rows = {row["trace_id"]: row for row in rows_in(command(settings, "dead-letter", "list").stdout)}
    assert rows["kp:trace:sent"]["queued_ms"] == queued_ms
    assert "queued_ms" not in rows["kp:trace:plain"]
    words = explained(settings, "kp:trace:sent")
    assert f"by {report.node}, at delivery 1, queued for {queued_ms / 1_000:.3f} s:" in words


def test_rabbitmq_or_a_producer_may_have_stamped_a_message(rabbitmq: RabbitMQ, tmp_path: Path) -> None:
    now_s, is_known = int(time.time()), dict[str, bool]()
    stamps: list[tuple[dict[str, Any], bool]] = [
        ({"timestamp": now_s - 100}, True),
        ({"timestamp": now_s - 3, "application_headers": {"timestamp_in_ms": 1_000 * (now_s - 100)}}, True),
        ({}, False),
        # Some producers write the timestamp in milliseconds.
        ({"timestamp": 1_000 * (now_s - 100)}, False),
    ]
    with at_work(rabbitmq.settings(), tmp_path) as (_, client):
        for kind in ("traces", "intake"):
            for (stamp, is_time), trace in zip(stamps, fresh_samples(len(stamps)), strict=True):
                rabbitmq.send(kind, json.dumps(trace).encode(), **stamp)
                is_known[trace["id"]] = is_time
        for trace_id, is_time in is_known.items():
            received = client.wait(trace_id, timeout_s=PATIENCE_S).received
            assert received
            assert (received.queued_ms is not None) == is_time
            assert 100_000 <= (received.queued_ms or 100_000) < 160_000
