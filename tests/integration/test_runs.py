"""Open runs in Redis: each is claimed, converted and submitted once, whichever process dies at whatever moment."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.serve.submitter import Submitter
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Revision
from kp_scorer.store.runs import NO_WAIT, ClaimedRun, ReceivedSpan

from tests.support.changed_settings import with_changed
from tests.support.http_server import SUPPLIED, chat_span, new_run, open_server
from tests.support.late_outcomes import late_outcome
from tests.support.processes import wait_until

QUICK = {"serve__quiet_s": 0.001}
"""Settings by which a run is complete as soon as its root has come."""
OF_SERVER = {**SUPPLIED, **QUICK}


@pytest.fixture
def store(settings: Settings) -> Iterator[Store]:
    """The store of a server whose runs are complete as soon as their roots have come."""
    with Store.open(with_changed(settings, **OF_SERVER)) as opened:
        yield opened


def claimed(store: Store) -> ClaimedRun:
    """Wait until a run is complete, and claim it."""
    run = wait_until(store.runs.claim)
    assert run
    return run


def stored_run(store: Store) -> tuple[str, bytes]:
    """Store a run of a single span; return its id and the span."""
    run_id = new_run()
    span = json.dumps(chat_span(run_id)).encode()
    assert store.runs.store(run_id, [ReceivedSpan("f" * 16, span)]) == ("stored", 0)
    return run_id, span


@pytest.mark.parametrize("ended", ["submitted", "kept", "dead", "deleted"])
def test_a_run_that_ends_leaves_the_share_of_its_sender(
    settings: Settings, keys: Keys, redis_client: redis.Redis, ended: str
) -> None:
    keeping = with_changed(settings, **QUICK, serve__keep_spans_s=60.0 if ended == "kept" else 0.0)
    with Store.open(keeping) as collecting:
        for number, (run_id, sender) in enumerate([("a", "first"), ("b", "first"), ("c", "second"), ("c", "first")]):
            assert collecting.runs.store(run_id, [ReceivedSpan(f"{number:016x}", b"{}")], "", sender) == ("stored", 0)
        assert redis_client.hmget(keys.runs_by_sender, "first", "first:bytes") == [b"2", b"4"]
        assert redis_client.hmget(keys.runs_by_sender, "second", "second:bytes") == [b"1", b"4"]
        if ended != "deleted":
            assert collecting.runs.finish("a", "dead" if ended == "dead" else "submitted")
            assert redis_client.hmget(keys.runs_by_sender, "first", "first:bytes") == [b"1", b"2"]
            assert collecting.runs.finish("b", "left_out")
            assert redis_client.hget(keys.runs_by_sender, "first") is None
        redis_client.delete(*map(keys.run, "bc"), *([keys.run("a")] if ended == "deleted" else []))
        # A process that claims runs skips the deleted ones.
        wait_until(lambda: collecting.runs.claim() is None and not redis_client.exists(keys.runs_by_sender))


def test_run_that_has_ended_leaves_little_in_redis(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    spans = [ReceivedSpan(f"{number:016x}", b"{}") for number in range(settings.serve.run_spans)]
    assert store.runs.store("a", spans[1:]) == ("stored", 0)
    assert store.runs.finish("a", "left_out")
    used: Any = redis_client.memory_usage(keys.run("a"), samples=0)
    assert used < 25 * len(spans)
    # Spans that are sent again count as stored.
    assert store.runs.store("a", spans) == ("closed", 1)


def test_a_claimed_run_is_the_same_for_the_next_claimer(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    spans = [ReceivedSpan(f"{number:016x}", b"[%d]" % number) for number in range(5)]
    assert store.runs.store("r", spans) == ("stored", 0)
    run = claimed(store)
    assert run.spans == [b"[%d]" % number for number in range(5)]
    assert store.runs.claim() is None
    assert store.runs.close(run, "")
    assert store.runs.store("r", [*spans, ReceivedSpan("f" * 16, b"{}")]) == ("closed", 1)
    # The next process that claims the run can only close it.
    store.runs.wait(run, is_empty=False)
    redis_client.zadd(keys.runs, {"r": 0})
    assert store.runs.claim() == run._replace(attempts=2, closed=NO_WAIT)
    store.runs.finish("r", "submitted")
    store.runs.finish("r", "submitted")
    assert store.runs.store("r", spans) == ("closed", 0)
    assert store.runs.claim() is None


def test_a_process_that_has_lost_its_claim_submits_nothing(store: Store, keys: Keys, redis_client: redis.Redis) -> None:
    # A process that is stopped for longer than its claim lasts goes on with what it claimed.
    store.runs.store("r", [ReceivedSpan("a" * 16, b"{}")])
    stopped = claimed(store)
    store.runs.store("r", [ReceivedSpan("b" * 16, b"{}")])
    assert store.runs.close(claimed(store), "")
    assert not store.runs.close(stopped, "")
    store.runs.finish("r", "submitted")
    assert not store.runs.close(stopped, "")


def test_a_run_that_grows_during_its_conversion_is_not_charged_with_an_attempt(store: Store) -> None:
    for number in range(0, 10, 2):
        store.runs.store("r", [ReceivedSpan(f"{number:016x}", b"{}")])
        run = claimed(store)
        assert run.attempts == 1
        store.runs.store("r", [ReceivedSpan(f"{number + 1:016x}", b"{}")])
        assert not store.runs.close(run, "")


def test_an_outcome_that_comes_while_its_run_is_claimed_is_not_overlooked(
    settings: Settings, keys: Keys, redis_client: redis.Redis
) -> None:
    with Store.open(with_changed(settings, **QUICK, serve__outcome_wait_s=3_600.0)) as store:
        assert store.runs.store("r", [ReceivedSpan("a" * 16, b"[]")]) == ("stored", 0)
        run = claimed(store)
        late = late_outcome("of-some-producer", trace_id=run.trace_id)
        assert store.ledger.revise([Revision("kp:outcome:1", bytes(16), run.trace_id, late)]) == ["waits"]
        assert not store.runs.close(run, "", "")
        run = claimed(store)
        known = store.ledger.waiting_outcome(run.trace_id)
        assert known
        assert not known.success
        # A process that claims the run after another one has closed it learns the outcome with which it was closed.
        assert store.runs.close(run, "", '{"success":false}')
        redis_client.zadd(keys.runs, {"r": 0})
        assert claimed(store).closed == '{"success":false}'


def test_a_run_that_ends_its_processes_becomes_a_dead_letter(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    run_id, span = stored_run(store)
    for attempts in range(1, settings.worker.max_attempts + 1):
        # Each process that claims the run dies, after which its claim expires.
        assert claimed(store).attempts == attempts
        redis_client.zadd(keys.runs, {run_id: 0})
    with open_server(settings, tmp_path / "server.log", **SUPPLIED):
        (dead,) = wait_until(lambda: list(store.dead_letters.read()))
    assert (dead.reason, dead.trace_id) == ("poison", f"kp:trace:otel:{run_id}")
    assert span in store.dead_letters.payload(dead.letter_id)
    assert store.ledger.counts() == (1, 0, 0, 1)


def test_a_run_that_waits_for_the_broker_is_not_charged_with_an_attempt(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    away = with_changed(settings, **OF_SERVER, broker__url="redis://127.0.0.1:1/0")
    run_id, _ = stored_run(store)
    with Client(away) as client:
        submitter = Submitter(away, store, {"": client})
        with closing(submitter._converting), pytest.raises(ServiceUnavailable):
            submitter._complete(claimed(store))
    assert redis_client.hget(keys.run(run_id), ":attempts") is None


def test_a_run_whose_process_died_before_it_was_removed_is_submitted_once(settings: Settings, store: Store) -> None:
    supplied = with_changed(settings, **OF_SERVER)
    stored_run(store)
    run = claimed(store)
    with Client(supplied) as client:
        for _ in range(2):
            submitter = Submitter(supplied, store, {"": client})
            with closing(submitter._converting):
                submitter._submit(run, submitter._converted(run))
    assert store.ledger.counts() == (1, 1, 0, 0)
    assert list(store.dead_letters.read()) == []
