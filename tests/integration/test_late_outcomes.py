"""On both brokers, each late outcome leads to one revision, whoever sends it and however often."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer import stored_decisions, stored_labels
from kp_scorer.client import AsyncClient
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, TraceConflict, TraceDead
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys

from tests.support.arena import put
from tests.support.changed_settings import SettingsWith
from tests.support.commands import command
from tests.support.late_outcomes import id_known_by, late_outcome
from tests.support.outcomes import published
from tests.support.processes import PATIENCE_S, at_work, wait_until
from tests.support.traces import fresh_samples

SECRET = "known-to-the-producer-alone"
OWN_ID = id_known_by(SECRET)


def test_an_outcome_revises_its_trace_once(on_broker: SettingsWith, store: Store, tmp_path: Path) -> None:
    settings, (trace,) = on_broker(), fresh_samples(1)
    with at_work(settings, tmp_path) as (worker, client):
        first = client.wait(client.submit(trace), PATIENCE_S)
        fields: Any = {"success": not trace["metadata"]["success"], "confidence": 1.0, "reason": "a test"}
        outcome_id = client.submit_outcome(first.trace_id, **fields)
        revision = client.wait(outcome_id, PATIENCE_S)
        # Repeating an outcome changes nothing: the client finds it decided, and a worker answers a message with the stored
        # revision.
        assert client.submit_outcome(first.trace_id, **fields) == outcome_id
        with pytest.raises(TraceConflict):
            client.submit_outcome(first.trace_id, success=fields["success"], outcome_id=outcome_id)
        third = client.wait(asyncio.run(_again(settings, first.trace_id)), PATIENCE_S)
        assert client.submit(trace) == first.trace_id
        put(settings, json.dumps(trace).encode())
        wait_until(lambda: len(worker.events("trace_decided")) == 2)
        (status,) = client.look_up([first.trace_id])
    assert (revision.revision, third.revision) == (2, 3)
    assert revision.supersedes
    assert revision.revised_by
    assert revision.supersedes.decided_at == first.decided_at
    assert revision.revised_by.model_dump() == {"id": outcome_id, **fields}
    as_before = {"novelty", "weights", "threshold", "domain", "pinned", "timings", "stated"}
    assert revision.model_dump(include=as_before) == first.model_dump(include=as_before)
    assert status
    assert status.decision == third
    # A reader that knows nothing of revisions sees only the first decision, even if the message of the trace comes again.
    assert [Decision.model_validate(each) for each in published(settings)] == [first, first]
    assert [Decision.model_validate(each) for each in published(settings, "revised")] == [revision, third]
    assert store.ledger.counts() == (3, 0, 3, 0)


async def _again(settings: Settings, trace_id: str) -> str:
    async with AsyncClient(settings) as client:
        return await client.submit_outcome(trace_id, success=True, confidence=0.5)


def test_an_outcome_waits_for_its_trace(on_broker: SettingsWith, store: Store, tmp_path: Path) -> None:
    settings = on_broker(ledger__resend_after_s=2.0)
    (trace,) = fresh_samples(1)
    trace["id"] = OWN_ID
    with at_work(settings, tmp_path) as (worker, client):
        put(settings, late_outcome(SECRET), late_outcome(SECRET))
        wait_until(lambda: len(worker.events("outcome_waits")) == 2)
        assert store.ledger.counts() == (1, 1, 0, 0)
        assert store.ledger.look_up([OWN_ID]) == [None], "the trace is not known yet"
        put(settings, json.dumps(trace).encode())
        revision = client.wait("kp:outcome:1", PATIENCE_S)
    (first,) = published(settings)
    assert (first["trace_id"], revision.revision) == (OWN_ID, 2)
    assert [each["decided_at"] for each in published(settings, "revised")] == [revision.decided_at]
    assert store.ledger.counts() == (2, 0, 2, 0)


def test_the_age_of_what_is_pending_is_that_of_traces(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    now_ms = time.time() * 1_000
    waiting = {f"kp:outcome:{number}": now_ms - 600_000 for number in range(700)}
    redis_client.zadd(keys.pending, waiting | {"another application's": -1})
    assert store.ledger.oldest_pending_s() == 0
    redis_client.zadd(keys.pending, {OWN_ID: now_ms - 60_000})
    assert 60 <= store.ledger.oldest_pending_s() < 60 + PATIENCE_S
    redis_client.zadd(keys.pending, {f"kp:outcome:{number}": now_ms - 600_000 for number in range(10_000)})
    assert store.ledger.oldest_pending_s() == 0, "it reads no further"


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_an_outcome_of_anothers_trace_is_dead_and_changes_nothing(
    on_broker: SettingsWith, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    settings, (trace,) = on_broker(), fresh_samples(1)
    with at_work(settings, tmp_path) as (_, client):
        decision = client.wait(client.submit(trace), PATIENCE_S)
        record = f"kp:trace:{decision.trace_id}"
        before = redis_client.hgetall(record)
        put(
            settings,
            late_outcome(SECRET, trace_id=decision.trace_id),
            late_outcome(SECRET, "kp:outcome:2", success=None),
            late_outcome(SECRET, "kp:outcome:3", trace_id="kp:trace:never"),
        )
        for number, detail in ((1, "key: "), (2, "success: "), (3, "key: ")):
            with pytest.raises(TraceDead, match=detail):
                client.wait(f"kp:outcome:{number}", PATIENCE_S)
        assert redis_client.hgetall(record) == before
        assert not redis_client.exists("kp:trace:kp:trace:never")
        (forged,) = [each for each in store.dead_letters.read() if each.trace_id == "kp:outcome:1"]
        replayed = command(settings, "dead-letter", "replay", forged.letter_id)
        assert json.loads(replayed.stdout)["state"] == "pending"
        # Replaying a forged outcome does not make it valid.
        with pytest.raises(TraceDead, match="key"):
            client.wait("kp:outcome:1", PATIENCE_S)
        with pytest.raises(InvalidTrace, match="confidence"):
            client.submit_outcome(decision.trace_id, success=True, confidence=2)
    assert published(settings, "revised") == []


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_the_command_submits_an_outcome(on_broker: SettingsWith, store: Store, tmp_path: Path) -> None:
    settings, (trace,) = on_broker(), fresh_samples(1)
    with at_work(settings, tmp_path) as (_, client):
        trace_id = client.wait(client.submit(trace), PATIENCE_S).trace_id
        # A variable that is not set says nothing about the trace.
        assert command(settings, "outcome", trace_id, "--success", "").exit_code == 2
        done = command(settings, "outcome", trace_id.removeprefix("kp:trace:")[:12], "--success", "false", "--reason", "late")
        row = json.loads(done.stdout)
        assert (done.exit_code, row["trace_id"], row["state"]) == (0, trace_id, "pending")
        revision = client.wait(row["outcome_id"], PATIENCE_S)
    assert revision.revised_by
    assert revision.revised_by.reason == "late"
    status_row = json.loads(command(settings, "status", trace_id).stdout)
    assert (status_row["decision"]["revision"], status_row["good"]) == (2, False)
    read = command(settings, "decisions", "--outcome", "revised")
    assert json.loads(read.stdout) == revision.model_dump(mode="json")
    assert "revision 2, as it is known now that the trace failed" in " ".join(
        command(settings, "explain", trace_id).stdout.split()
    )
    assert stored_labels(settings) == {trace_id: False}
    assert list(stored_decisions(settings)) == [revision]
    assert json.loads(command(settings, "stats").stdout)["revised"] == {revision.outcome: 1}
    assert command(settings, "audit").exit_code == 0
    # A person's label overrides the one that the outcome implies.
    assert command(settings, "label", trace_id, "good").exit_code == 0
    assert stored_labels(settings) == {trace_id: True}
    assert command(settings, "forget", trace_id).exit_code == 0
    assert store.ledger.look_up([trace_id, row["outcome_id"]]) == [None, None]
