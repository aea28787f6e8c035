"""A record or result that is damaged in Redis ends at most its own trace; it is named, and never quoted."""

import json
import re
import uuid
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import redis
from click.testing import CliRunner
from kp_scorer.broker.calls import declare_queues
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.main import commands
from kp_scorer.client import Client
from kp_scorer.decision import Novelty
from kp_scorer.novelty import Candidate, Window
from kp_scorer.novelty.log import Entry, Place
from kp_scorer.novelty.verification import with_nearest
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.submission_resender import resend_lost
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import LedgerSettings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLettering
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Identity, Submission, SubmissionCounts

from tests.support.builders import decision, decision_on, first_queues, store_decisions
from tests.support.processes import PATIENCE_S, SMALL_WORKER, start_worker, wait_until
from tests.support.traces import short_traces

SECRET: Final = "the patient's name"
DIGEST: Final = bytes(16)
TTL_MS: Final = 600_000

DAMAGES: Final[dict[str, dict[str, Any]]] = {
    "an unknown state": {"state": SECRET},
    "a decision that is no JSON": {"state": "decided", "decision": SECRET},
    "a decision of a later kind": {"state": "decided", "decision": json.dumps({"schema_version": 2, "x": SECRET})},
    "a decision that is missing": {"state": "decided", "decision": ""},
    "dead without a reason": {"state": "dead"},
    "dead of an unknown reason": {"state": "dead", "reason": SECRET},
    "bytes that are no text": {"state": b"\xff\xfe", "detail": b"\xff"},
    "attempts": {"attempts": SECRET, "owner": "gone", "held_until_ms": SECRET},
    "a lease without an end": {"owner": "gone", "held_until_ms": "nan", "attempts": "1e400"},
    "a place that is none": {"entry": SECRET},
}
"""Fields to set in the record of a pending trace. The last three are the ledger's own notes, which it can do without."""
MENDED: Final = 3


def damage(redis_client: redis.Redis, record: str, fields: dict[Any, Any]) -> None:
    """Set fields of a record; without any, replace the record with a string."""
    if fields:
        redis_client.hset(record, mapping=fields)
    else:
        redis_client.set(record, SECRET)
    redis_client.pexpire(record, TTL_MS)


def decide(store: Store, *trace_ids: str) -> None:
    store_decisions(store, {trace_id: decision_on(trace_id) for trace_id in trace_ids}, DIGEST)


def resent(settings: Settings, store: Store) -> None:
    """Have the resender look at the pending traces once."""
    queues = first_queues(settings)
    with make_celery(settings) as app:
        declare_queues(app, queues.in_order)
        resend_lost(app, [queues], store, LedgerSettings(resend_after_s=0.001), Metrics(()), {})


def test_a_worker_decides_traces_whose_records_are_damaged(
    settings: Settings, client: Client, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    traces = short_traces(len(DAMAGES) + 4, seed=31)
    foreign, damaged, honest = traces[0], traces[1 : len(DAMAGES) + 1], traces[len(DAMAGES) + 1 :]
    for trace in (foreign, *damaged, *honest):
        client.submit(trace)
    for trace, fields in zip((foreign, *damaged), ({}, *DAMAGES.values()), strict=True):
        damage(redis_client, keys.record(trace["id"]), fields)
    for counter in ("submitted", "decided", "dead"):
        redis_client.hset(keys.counts, counter, SECRET)
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER) as worker:
        for trace in (*honest, *damaged[-MENDED:]):
            assert client.wait(trace["id"], timeout_s=PATIENCE_S)
        wait_until(lambda: len(list(store.dead_letters.read())) == len(damaged) - MENDED + 1)
        wait_until(lambda: redis_client.llen(settings.queues.first) == 0)
    assert {letter.reason for letter in store.dead_letters.read()} == {"damaged"}
    assert "patient" not in worker.text()
    # These traces are dead like any others, so their dead letters can be replayed.
    ids = {letter.trace_id for letter in store.dead_letters.read()} - {foreign["id"]}
    assert len(ids) == len(damaged) - MENDED
    assert {record.state for record in store.ledger.look_up(list(ids)) if record} == {"dead"}
    assert store.ledger.counts().decided >= len(honest)


def test_a_result_that_cannot_be_stored_does_not_affect_other_results(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    # Another Celery app, which pickles its results, may have left this.
    spoilt, *others = (str(uuid.uuid4()) for _ in range(4))
    redis_client.set(f"celery-task-meta-{spoilt}", b"\x80\x04", ex=60)
    for task_id, trace in zip((spoilt, *others), short_traces(4, seed=61), strict=True):
        headers = {"task": "score_trace", "id": task_id, "ignore_result": False}
        envelope = {"body": json.dumps([[trace], {}, None]), "content-type": "application/json", "properties": {}}
        redis_client.lpush(settings.queues.first, json.dumps(envelope | {"headers": headers}))
    # The worker receives all of them as it starts, and so as one batch.
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER) as worker:
        wait_until(lambda: len(worker.events("trace_decided")) == 4 and worker.events("result_not_stored"))
        wait_until(lambda: all(redis_client.exists(f"celery-task-meta-{task_id}") for task_id in others))


def test_damaged_records_end_no_round_of_the_reconciler(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    trace_ids = [f"kp:trace:{number}" for number in range(7)]
    store.ledger.submit([Submission(trace_id, DIGEST, trace_id.encode()) for trace_id in trace_ids])
    for trace_id, name in zip(trace_ids[:3], ("since_ms", "resends", "held_until_ms"), strict=True):
        redis_client.hset(keys.record(trace_id), name, SECRET)
    redis_client.hdel(keys.record(trace_ids[3]), "submission", "since_ms", "digest")
    redis_client.hset(keys.record(trace_ids[5]), "state", SECRET)
    damage(redis_client, keys.record(trace_ids[4]), {})
    decide(store, "kp:trace:decided")
    # An entry in the index cannot make the ledger forget a decision.
    index: dict[Any, Any] = {"kp:trace:decided": 0, b"\xff": 0, "kp:trace:none": "-inf"}
    redis_client.zadd(keys.pending, index)
    for trace_id in trace_ids:
        redis_client.zadd(keys.pending, {trace_id: 1})
    resent(settings, store)
    assert redis_client.llen(settings.queues.first) == 4
    (letter,) = store.dead_letters.read()
    assert (letter.reason, letter.trace_id) == ("damaged", trace_ids[5])
    assert store.dead_letters.payload(letter.letter_id) == trace_ids[5].encode()
    assert {record.state for record in store.ledger.look_up(trace_ids[5:6]) if record} == {"dead"}
    (record,) = store.ledger.look_up(["kp:trace:decided"])
    assert record
    assert record.decision
    assert redis_client.zscore(keys.pending, "kp:trace:decided") is None
    redis_client.delete(*(keys.record(trace_id) for trace_id in trace_ids), keys.pending)


def test_a_record_that_was_mended_meanwhile_keeps_its_decision(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    trace_id, payload = "kp:trace:mended", b"{}"
    store.ledger.acquire([Identity(trace_id, DIGEST)])
    damage(redis_client, keys.record(trace_id), {"state": SECRET})
    (refused,) = store.ledger.acquire([Identity(trace_id, DIGEST)])
    assert refused.reason == "damaged"
    # Before that worker dead-letters it, its client submits it again, and another worker decides it.
    store.ledger.submit([Submission(trace_id, DIGEST, payload)])
    decide(store, trace_id)
    stored = store.dead_letters.dead_letter(payload, DeadLettering(refused.reason, refused.detail, trace_id, DIGEST))
    (record,) = store.ledger.look_up([trace_id])
    assert stored
    assert record
    assert record.decision == stored
    assert list(store.dead_letters.read()) == []


def test_a_decision_of_a_later_version_is_not_deleted(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    trace_id = "kp:trace:later"
    decide(store, trace_id)
    fields = json.loads(decision_on(trace_id)) | {"outcome": "deferred"}
    redis_client.hset(keys.record(trace_id), "decision", json.dumps(fields))
    (refused,) = store.ledger.acquire([Identity(trace_id, DIGEST)])
    assert refused.reason == "damaged"
    for reason in ("damaged", "poison"):
        assert store.dead_letters.dead_letter(b"{}", DeadLettering(reason, refused.detail, trace_id, DIGEST)) is None
        assert redis_client.hget(keys.record(trace_id), "decision") == json.dumps(fields).encode()
        # The dead letter keeps the message and says why.
        (letter,) = store.dead_letters.read()
        assert (letter.reason, letter.trace_id) == ("damaged", trace_id)
    assert store.ledger.counts() == SubmissionCounts(submitted=2, pending=0, decided=1, dead=1)


def test_a_record_without_its_state_comes_to_an_end(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    lost, placed = "kp:trace:lost", "kp:trace:placed"
    store.ledger.submit([Submission(lost, DIGEST, b"{}")])
    redis_client.hdel(keys.record(lost), "state")
    redis_client.zadd(keys.pending, {lost: 1})
    # The log notes a trace's place even if the ledger has forgotten the trace.
    store.novelty_log("space-1").append([Candidate(placed, DIGEST, np.full(4, 0.5, np.float32))], None)
    assert [record and record.reason for record in store.ledger.look_up([lost, placed])] == ["damaged", None]
    resent(settings, store)
    (letter,) = store.dead_letters.read()
    assert (letter.reason, letter.trace_id) == ("damaged", lost)
    assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=0, dead=1)


def test_a_pending_record_without_its_digest_comes_to_an_end(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    lost = "kp:trace:lost"
    store.ledger.submit([Submission(lost, DIGEST, b"{}")])
    redis_client.hdel(keys.record(lost), "digest")
    for _ in range(LedgerSettings.max_resends + 2):
        redis_client.zadd(keys.pending, {lost: 1}, xx=True)
        resent(settings, store)
    (letter,) = store.dead_letters.read()
    assert (letter.reason, letter.trace_id, letter.occurrences) == ("lost", lost, 1)
    assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=0, dead=1)


def test_a_record_that_has_lost_its_state_is_counted_once(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    submission = Submission("kp:trace:stateless", DIGEST, b"{}")
    store.ledger.submit([submission])
    redis_client.hdel(keys.record(submission.trace_id), "state")
    assert store.ledger.submit([submission]) == ["pending"]
    assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=1, decided=0, dead=0)


@pytest.mark.parametrize(
    "fields",
    [{}, {"state": SECRET}, {"state": "decided", "decision": SECRET}, {"state": "dead", "reason": SECRET}],
    ids=["something else", "an unknown state", "a decision that is no JSON", "dead of an unknown reason"],
)
def test_a_trace_that_left_the_index_is_counted_again_when_its_message_comes(
    store: Store, keys: Keys, redis_client: redis.Redis, fields: dict[str, Any]
) -> None:
    # The trace came without our client, so there is nothing to send again.
    trace_id = "kp:trace:foreign"
    store.ledger.acquire([Identity(trace_id, DIGEST)])
    damage(redis_client, keys.record(trace_id), fields)
    redis_client.zadd(keys.pending, {trace_id: 1})
    assert [claim.payload for claim in store.ledger.claim_lost(1, empty_ms_ago=0)] == [b""]
    assert store.ledger.counts() == SubmissionCounts(submitted=0, pending=0, decided=0, dead=0)
    (refused,) = store.ledger.acquire([Identity(trace_id, DIGEST)])
    assert refused.reason == "damaged"
    store.dead_letters.dead_letter(b"{}", DeadLettering("damaged", refused.detail, trace_id, DIGEST))
    assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=0, dead=1)


@pytest.mark.usefixtures("as_operator")
def test_commands_name_damaged_records_and_go_on(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    damages = {f"kp:trace:damaged-{number}": fields for number, fields in enumerate([{}, *DAMAGES.values()])}
    decide(store, *(f"kp:trace:{number}" for number in range(70)), *damages)
    for trace_id, fields in damages.items():
        store.novelty_log("space-1").append([Candidate(trace_id, DIGEST, np.full(4, 0.5, np.float32))], None)
        damage(redis_client, keys.record(trace_id), fields)
    # Add a damaged record whose name is not even text.
    redis_client.hset(b"kp:trace:\xff", "state", SECRET)
    redis_client.pexpire(b"kp:trace:\xff", TTL_MS)
    damaged, mended = list(damages)[:-MENDED], list(damages)[-MENDED:]

    def names(command: str, *trace_ids: str) -> None:
        """Assert that a command names exactly these traces as damaged, and fails if there are any."""
        done = CliRunner().invoke(commands, command.split())
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exc_info)
        assert "patient" not in done.output, command
        named = [trace_id for trace_id in damages if re.search(rf"{trace_id}\b.*\brecord\b", done.output)]
        assert (named, done.exit_code) == ([*trace_ids], int(bool(trace_ids))), f"{command}: {done.output}"

    for asked in ("status", "explain"):
        for trace_id in damaged:
            names(f"{asked} {trace_id}", trace_id)
        for trace_id in mended:
            names(f"{asked} {trace_id}")
    names("audit", *damaged)
    # Commands that read all records skip keys that are not hashes.
    names("report --stored --text", *damaged[1:])
    names("calibrate --stored --accept 20% --output -", *damaged[1:])
    for asked in ("cache info", "stats", *(f"forget {trace_id}" for trace_id in damages)):
        names(asked)
    assert store.ledger.look_up(list(damages)) == [None] * len(damages)


@pytest.mark.usefixtures("as_operator")
def test_a_damaged_log_entry_counts_as_erased_and_an_impossible_place_stops_no_worker(
    settings: Settings, client: Client, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    first, second = short_traces(2, seed=33)
    of_log = keys.of_log("word-hash-1")
    with start_worker(settings, tmp_path / "worker.log", command=SMALL_WORKER) as worker:
        client.wait(client.submit(first), timeout_s=PATIENCE_S)
        entries: Any = redis_client.xrevrange(of_log.log, count=1)
        at_ms, _, number = entries[0][0].decode().partition("-")
        nan = np.full(512, np.nan, np.float32).tobytes()
        short = np.ones(100, np.float32).tobytes()
        damaged: list[dict[Any, Any]] = [
            {"x": "y"},
            {"i": b"\xff", "d": "", "v": "123"},
            {"i": "x", "d": "", "v": nan},
            {"i": "x", "d": "", "v": short},
            {"i": "x", "d": "", "v": entries[0][1][b"v"], "c": "perhaps"},
        ]
        for offset, fields in enumerate(damaged):
            redis_client.xadd(of_log.log, fields, f"{at_ms}-{int(number) + offset + 1}")
        redis_client.hset(of_log.head, "place", int(number) + len(damaged))
        epoch: Any = redis_client.hget(of_log.head, "epoch")
        redis_client.hset(keys.record(second["id"]), mapping={"epoch": epoch, "entry": f"{at_ms}-{int(number) + 77}"})
        decision = client.wait(client.submit(second), timeout_s=PATIENCE_S)
        assert decision.novelty.nearest
        assert decision.novelty.nearest.trace_id == first["id"]
        assert worker.process.poll() is None
    audited = CliRunner().invoke(commands, ["audit"])
    assert (audited.exit_code, "5 damaged" in audited.output) == (1, True), audited.output


def test_the_nearest_trace_is_known_whatever_was_written_to_the_log_since() -> None:
    vectors = [1.0, 0.0], [0.6, 0.8], [1.0, 0.0, 0.0]
    entries = [
        Entry(Place(1, number), f"kp:trace:{number}", bytes([number]) * 16, np.array(vector, np.float32))
        for number, vector in enumerate(vectors, 1)
    ]
    unnamed = decision("kp:trace:2").model_copy(update={"novelty": Novelty(source="embedding", entry="1-2")})
    window = Window(10, TTL_MS, 10, TTL_MS)
    nearest = with_nearest(unnamed, entries, window).novelty.nearest
    assert nearest
    assert nearest.trace_id == "kp:trace:1"
    assert with_nearest(unnamed, entries[-1:], window) == unnamed
