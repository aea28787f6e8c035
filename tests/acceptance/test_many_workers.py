"""Four workers score as one: the same novelty as a single scorer would give in the log's order."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.ledger import Store
from kp_scorer.offline import offline_decider
from kp_scorer.settings import Settings

from tests.support.changed_settings import with_changed
from tests.support.fleet import start_fleet
from tests.support.outcomes import audited, only_log, place_in_log, published
from tests.support.processes import FAST_WORKER, KP_SCORER_WORKER, wait_until
from tests.support.traces import new_id, short_traces

WORKERS = 4


@pytest.fixture
def small(settings: Settings) -> Settings:
    """Four workers on a small machine: a thread each, few messages in flight, so that all of them get work."""
    return with_changed(settings, worker__concurrency=8, worker__batch_size=4, embedding__threads=1)


@pytest.fixture
def apart(small: Settings) -> Settings:
    """The same, with the log and the ledger in an empty database of their own, apart from the queues."""
    settings = with_changed(small, redis__url=small.redis.url.removesuffix("/0") + "/2")
    with redis.Redis.from_url(settings.redis.url) as redis_client:
        redis_client.flushdb()
    return settings


def decide_all(client: Client, traces: Sequence[dict[str, Any]], timeout_s: float = 60) -> dict[str, Decision]:
    """Submit traces one by one; their decisions by trace id. Each must get one."""
    for trace in traces:
        client.submit(trace)
    ids = [str(trace["id"]) for trace in traces]
    statuses = client.as_completed(ids, timeout_s=timeout_s)
    decisions = {status.trace_id: status.decision for status in statuses if status.decision}
    assert decisions.keys() == set(ids)
    return decisions


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_traces_in_any_order_get_the_scores_of_one_offline_scorer(
    small: Settings, store: Store, tmp_path: Path, real_traces: list[dict[str, Any]]
) -> None:
    payloads = {str(trace["id"]): trace for trace in random.Random(1).sample(real_traces, 60)}
    with start_fleet(small, tmp_path, 2, KP_SCORER_WORKER) as fleet, Client(small) as client:
        decisions = decide_all(client, list(payloads.values()), timeout_s=400)
        shares = [len(worker.events("trace_decided")) for worker in fleet]
    assert min(shares) > 0, f"some worker did nothing: {shares}"

    report = audited(small, store)
    assert report.differences == []
    assert report.agreeing == len(payloads)

    offline = offline_decider(small)
    order = [entry.trace_id for entry in only_log(store).entries()]
    for start in range(0, len(order), 8):
        batch = [decode_trace(payloads[trace_id], small.limits) for trace_id in order[start : start + 8]]
        for again in offline.decide(batch):
            assert isinstance(again, Decision)
            assert again.score == pytest.approx(decisions[again.trace_id].score, abs=0.001)


def test_of_two_identical_traces_at_the_same_moment_exactly_one_is_new(small: Settings, store: Store, tmp_path: Path) -> None:
    pairs = [(trace, trace | {"id": new_id()}) for trace in short_traces(200, seed=7)]
    with start_fleet(small, tmp_path, WORKERS, FAST_WORKER), Client(small) as client:
        decisions = decide_all(client, [trace for pair in pairs for trace in pair])
    for pair in pairs:
        original, copy = sorted((decisions[trace["id"]] for trace in pair), key=place_in_log)
        assert copy.dimensions.novelty == 0.0
        assert copy.novelty.duplicate_of == original.trace_id
        assert original.dimensions.novelty > 0.01
    assert audited(small, store).differences == []
    assert len(published(small)) == 400


def test_no_worker_compares_with_an_erased_trace_after_a_second(
    small: Settings, store: Store, redis_client: redis.Redis, tmp_path: Path
) -> None:
    (trace,) = short_traces(1, seed=9)
    others = short_traces(30, seed=10)
    with start_fleet(small, tmp_path, WORKERS, FAST_WORKER), Client(small) as client:
        decide_all(client, [trace, *others])
        assert only_log(store).erase(str(trace["id"])).total() == 1
        redis_client.delete(f"kp:trace:{trace['id']}")
        copies = [trace | {"id": new_id(), "source_skill": str(index)} for index in range(40)]
        decisions = list(decide_all(client, copies).values())
    assert all(each.novelty.nearest and each.novelty.nearest.trace_id != trace["id"] for each in decisions)
    first = min(decisions, key=place_in_log)
    assert first.dimensions.novelty > 0.01, "the erased trace was the only one like it"
    assert audited(small, store).differences == []


def test_workers_survive_an_emptied_store_and_compare_with_no_erased_trace(apart: Settings, tmp_path: Path) -> None:
    before, after = short_traces(60, seed=11), short_traces(60, seed=12)
    with (
        redis.Redis.from_url(apart.redis.url) as redis_client,
        Store.open(apart) as store,
        start_fleet(apart, tmp_path, WORKERS, FAST_WORKER) as fleet,
        Client(apart) as client,
    ):
        decide_all(client, before)
        redis_client.flushdb()
        decisions = decide_all(client, after)
        assert all(worker.process.poll() is None for worker in fleet)
        report = audited(apart, store)
    nearest = {decision.novelty.nearest.trace_id for decision in decisions.values() if decision.novelty.nearest}
    assert nearest <= decisions.keys()
    assert (report.agreeing, report.differences) == (60, [])


def test_idle_workers_read_the_log_on(small: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    with start_fleet(small, tmp_path, 1, FAST_WORKER):
        reads: Any = redis_client.info("commandstats")
        before = reads["cmdstat_xrange"]["calls"]

        def has_read_on() -> bool:
            now: Any = redis_client.info("commandstats")
            return bool(now["cmdstat_xrange"]["calls"] >= before + 4)

        wait_until(has_read_on, timeout_s=3)
