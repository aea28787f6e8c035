"""Four workers score as one: the same novelty as a single scorer would give in the log's order."""

import random
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.fleet import audited, log_entries, novelty_logs, published, short_traces, start_fleet
from tests.processes import FAST_WORKER, KP_SCORER_WORKER, wait_until
from tests.traces import new_id
from worker.client import Client
from worker.decider import Decider, NoveltyStage
from worker.decision import Decision
from worker.embedding import select_embedder
from worker.ledger import MemoryLedger
from worker.novelty import MemoryLog, NoveltyCache, Window
from worker.settings import Settings, load_settings
from worker.trace import decode_trace

WORKERS = 4


@pytest.fixture
def small(settings: Settings) -> Settings:
    """Four workers on a small machine: a thread each, little in hand, so that all of them get work."""
    return load_settings(
        {
            "broker.url": settings.broker.url,
            "redis.url": settings.redis.url,
            "worker.concurrency": "8",
            "worker.batch_size": "4",
            "embedding.threads": "1",
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_traces_in_any_order_get_the_scores_of_one_offline_scorer(
    small: Settings, client: redis.Redis, tmp_path: Path, real_traces: list[dict[str, Any]]
) -> None:
    payloads = {str(trace["id"]): trace for trace in random.Random(1).sample(real_traces, len(real_traces))}
    with start_fleet(small, tmp_path, WORKERS, KP_SCORER_WORKER) as fleet, Client(small) as submitter:
        for payload in payloads.values():
            submitter.submit(payload)
        statuses = list(submitter.as_settled(payloads, timeout_s=400))
        shares = [len(worker.events("trace_decided")) for worker in fleet]
    decisions = {status.trace_id: status.decision for status in statuses if status.decision}
    assert decisions.keys() == payloads.keys()
    assert min(shares) > 0, f"some worker did nothing: {shares}"

    report = audited(small, client)
    assert report.differences == []
    assert report.agreeing == len(payloads)

    embedder = select_embedder(small.embedding)
    assert embedder
    window = Window.of(small.novelty)
    cache = NoveltyCache(MemoryLog(window), window, embedder.dimensions)
    offline = Decider(MemoryLedger(), small.scoring.policy(), NoveltyStage(embedder, cache))
    order = [entry.trace_id for entry in log_entries(small, client)]
    for start in range(0, len(order), 8):
        batch = [decode_trace(payloads[trace_id], small.limits.limits()) for trace_id in order[start : start + 8]]
        for again in offline.decide(batch):
            assert isinstance(again, Decision)
            decided = decisions[again.trace_id]
            assert decided
            assert again.score == pytest.approx(decided.score, abs=0.001)


def test_of_two_identical_traces_at_the_same_moment_exactly_one_is_new(
    small: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    pairs = [(trace, trace | {"id": new_id()}) for trace in short_traces(200, seed=7)]
    with start_fleet(small, tmp_path, WORKERS, FAST_WORKER), Client(small) as submitter:
        for first, second in pairs:
            submitter.submit(first)
            submitter.submit(second)
        ids = [trace["id"] for pair in pairs for trace in pair]
        decisions = {status.trace_id: status.decision for status in submitter.as_settled(ids, timeout_s=60)}
    for first, second in pairs:
        one, other = decisions[first["id"]], decisions[second["id"]]
        assert one
        assert other
        original, copy = sorted((one, other), key=lambda decision: _place(decision))
        assert copy.dimensions.novelty == 0.0
        assert copy.novelty.duplicate_of == original.trace_id
        assert original.dimensions.novelty > 0.01
    assert audited(small, client).differences == []
    assert len(published(small)) == 400


def test_the_audit_finds_a_decision_that_the_log_does_not_explain(small: Settings, client: redis.Redis, tmp_path: Path) -> None:
    traces = short_traces(20, seed=8)
    with start_fleet(small, tmp_path, 1, FAST_WORKER), Client(small) as submitter:
        for trace in traces:
            submitter.submit(trace)
        assert len(list(submitter.as_settled([trace["id"] for trace in traces], timeout_s=60))) == 20
    key = f"kp:trace:{traces[10]['id']}"
    stored: Any = client.hget(key, "decision")
    decision = Decision.model_validate_json(stored)
    wrong = decision.dimensions.model_copy(update={"novelty": decision.dimensions.novelty / 2})
    client.hset(key, "decision", decision.model_copy(update={"dimensions": wrong}).model_dump_json())
    report = audited(small, client)
    assert [difference.trace_id for difference in report.differences] == [traces[10]["id"]]
    assert report.agreeing == 19


def test_an_erased_trace_is_forgotten_by_every_worker_within_a_second(
    small: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    (trace,) = short_traces(1, seed=9)
    others = short_traces(30, seed=10)
    with start_fleet(small, tmp_path, WORKERS, FAST_WORKER), Client(small) as submitter:
        for each in (trace, *others):
            submitter.submit(each)
        ids = [each["id"] for each in (trace, *others)]
        assert len(list(submitter.as_settled(ids, timeout_s=60))) == 31
        (log,) = novelty_logs(small, client)
        assert log.erase(trace["id"]) == 1
        client.delete(f"kp:trace:{trace['id']}")
        copies = [trace | {"id": new_id(), "source_skill": str(index)} for index in range(40)]
        for copy in copies:
            submitter.submit(copy)
        ids = [copy["id"] for copy in copies]
        decisions = [status.decision for status in submitter.as_settled(ids, timeout_s=60) if status.decision]
    assert len(decisions) == 40
    assert all(each.novelty.nearest and each.novelty.nearest.trace_id != trace["id"] for each in decisions)
    first = min(decisions, key=_place)
    assert first.dimensions.novelty > 0.01, "the erased trace was the only one like it"
    assert audited(small, client).differences == []


def test_workers_survive_that_the_store_is_emptied_and_compare_with_nothing_that_is_gone(
    small: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    # The queues stay; only the log and the ledger go.
    store_url = small.redis.url.removesuffix("/0") + "/2"
    apart = small.model_copy(update={"redis": small.redis.model_copy(update={"url": store_url})})
    before, after = short_traces(60, seed=11), short_traces(60, seed=12)
    with (
        redis.Redis.from_url(store_url) as store,
        start_fleet(apart, tmp_path, WORKERS, FAST_WORKER) as fleet,
        Client(apart) as submitter,
    ):
        store.flushdb()
        for trace in before:
            submitter.submit(trace)
        assert len(list(submitter.as_settled([trace["id"] for trace in before], timeout_s=60))) == 60
        store.flushdb()
        for trace in after:
            submitter.submit(trace)
        ids = [trace["id"] for trace in after]
        decisions = [status.decision for status in submitter.as_settled(ids, timeout_s=60) if status.decision]
        assert all(worker.process.poll() is None for worker in fleet)
        report = audited(apart, store)
    assert len(decisions) == 60
    nearest = {decision.novelty.nearest.trace_id for decision in decisions if decision.novelty.nearest}
    assert nearest <= set(ids)
    assert (report.agreeing, report.differences) == (60, [])


def test_traces_that_meet_a_store_that_refuses_them_wait_until_it_takes_them(
    small: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    store_url = small.redis.url.removesuffix("/0") + "/2"
    apart = small.model_copy(update={"redis": small.redis.model_copy(update={"url": store_url})})
    traces = short_traces(12, seed=13)
    ids = [trace["id"] for trace in traces]
    with (
        redis.Redis.from_url(store_url) as store,
        start_fleet(apart, tmp_path, 1, FAST_WORKER) as (worker,),
        Client(apart) as submitter,
    ):
        store.flushdb()
        # A key of the wrong type: the log can neither be read nor written.
        store.set("kp:log:word-hash-1", "in the way", px=60_000)
        for trace in traces:
            submitter.submit(trace)
        wait_until(lambda: len(worker.events("trace_waits")) == apart.worker.concurrency)
        assert not any(status and status.state != "pending" for status in submitter.look_up(ids))
        store.delete("kp:log:word-hash-1")
        settled = list(submitter.as_settled(ids, timeout_s=60))
        assert worker.process.poll() is None
    assert [status.state for status in settled] == ["decided"] * len(traces)


def test_idle_workers_keep_up_with_the_log(small: Settings, client: redis.Redis, tmp_path: Path) -> None:
    with start_fleet(small, tmp_path, 1, FAST_WORKER):
        reads: Any = client.info("commandstats")
        before = reads["cmdstat_xrange"]["calls"]

        def has_read_on() -> bool:
            now: Any = client.info("commandstats")
            return bool(now["cmdstat_xrange"]["calls"] >= before + 4)

        wait_until(has_read_on, timeout_s=3)


def _place(decision: Decision) -> int:
    assert decision.novelty.entry
    return int(decision.novelty.entry.partition("-")[2])
