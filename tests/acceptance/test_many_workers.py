"""Four workers score as one: they give each trace the novelty that a single scorer would, in the log's order."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.offline import offline_decider
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.changed_settings import settings_at
from tests.support.fleet import Fleet, start_fleet
from tests.support.outcomes import audited, only_log, place_in_log, published, read_until
from tests.support.processes import KP_SCORER_WORKER, PATIENCE_S, wait_until
from tests.support.traces import fresh_samples, new_id, short_traces

WORKERS = 4


@pytest.fixture(scope="module")
def small(redis_url: str) -> Settings:
    """Settings for workers on a small machine: one thread each, and few messages in flight, so that all of them get work.

    The queues and the scorer's state each have a database of their own, which the workers of all tests here use.
    """
    queues, kept = (redis_url.removesuffix("0") + database for database in "25")
    load = {"worker__concurrency": 12, "embedding__threads": 1, "embedding__embedder": "words"}
    return settings_at(queues, redis__url=kept, **load)


@pytest.fixture(scope="module")
def fleet(small: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with start_fleet(small, tmp_path_factory.mktemp("fleet"), WORKERS, KP_SCORER_WORKER) as started:
        yield started


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    with Client(fleet.settings) as opened:
        yield opened
    assert [worker.process.poll() for worker in fleet] == [None] * WORKERS


@pytest.fixture
def kept(small: Settings) -> Iterator[redis.Redis]:
    """A connection to the Redis that has the ledger and the log."""
    with redis.Redis.from_url(small.redis.url) as opened:
        yield opened


@pytest.fixture
def store(small: Settings) -> Iterator[Store]:
    with Store.open(small) as opened:
        yield opened


def decide_all(client: Client, traces: Sequence[dict[str, Any]]) -> dict[str, Decision]:
    """Submit traces one by one; return their decisions by trace id. Each trace must get one."""
    for trace in traces:
        client.submit(trace)
    ids = [str(trace["id"]) for trace in traces]
    decisions = {
        status.trace_id: status.decision for status in client.as_completed(ids, timeout_s=PATIENCE_S) if status.decision
    }
    assert decisions.keys() == set(ids)
    return decisions


def test_traces_in_any_order_get_the_scores_of_one_offline_scorer(
    fleet: Fleet, client: Client, store: Store, kept: redis.Redis
) -> None:
    kept.flushdb()
    payloads = {str(trace["id"]): trace for trace in [*fresh_samples(48), *short_traces(100, seed=8)]}
    decisions = decide_all(client, list(payloads.values()))
    shares = [len(worker.logged("trace_decided")) for worker in fleet]
    assert min(shares) > 0, f"some worker did nothing: {shares}"

    report = audited(fleet.settings, store)
    assert (report.agreeing, report.differences) == (len(payloads), [])

    offline = offline_decider(fleet.settings)
    order = [decode_trace(payloads[entry.trace_id], fleet.settings.limits) for entry in only_log(store).entries()]
    for again in offline.decide(order):
        assert isinstance(again, Decision)
        assert again.score == pytest.approx(decisions[again.trace_id].score, abs=1e-6)


def test_exactly_one_of_two_identical_simultaneous_traces_is_new(client: Client, small: Settings, store: Store) -> None:
    published(small)
    pairs = [(trace, trace | {"id": new_id()}) for trace in short_traces(200, seed=7)]
    decisions = decide_all(client, [trace for pair in pairs for trace in pair])
    for pair in pairs:
        original, copy = sorted((decisions[trace["id"]] for trace in pair), key=place_in_log)
        assert copy.dimensions.novelty == 0.0
        assert copy.novelty.duplicate_of == original.trace_id
        assert original.dimensions.novelty > 0.01
    assert audited(small, store).differences == []
    assert len(read_until(small, decisions)) == 400


def test_no_worker_compares_with_an_erased_trace_after_a_second(
    client: Client, small: Settings, store: Store, kept: redis.Redis
) -> None:
    (trace,) = short_traces(1, seed=9)
    decide_all(client, [trace, *short_traces(30, seed=10)])
    assert only_log(store).erase(str(trace["id"])).total() == 1
    kept.delete(f"kp:trace:{trace['id']}")
    copies = [trace | {"id": new_id(), "source_skill": str(index)} for index in range(40)]
    decisions = list(decide_all(client, copies).values())
    assert all(each.novelty.nearest and each.novelty.nearest.trace_id != trace["id"] for each in decisions)
    first = min(decisions, key=place_in_log)
    assert first.dimensions.novelty > 0.01, "the erased trace was the only one like it"
    assert audited(small, store).differences == []


def test_workers_survive_an_emptied_store_and_compare_with_no_erased_trace(
    client: Client, small: Settings, store: Store, kept: redis.Redis
) -> None:
    decide_all(client, short_traces(60, seed=11))
    kept.flushdb()
    decisions = decide_all(client, short_traces(60, seed=12))
    report = audited(small, store)
    nearest = {decision.novelty.nearest.trace_id for decision in decisions.values() if decision.novelty.nearest}
    assert nearest <= decisions.keys()
    assert (report.agreeing, report.differences) == (60, [])


@pytest.mark.usefixtures("fleet")
def test_idle_workers_read_the_log_on(kept: redis.Redis) -> None:
    reads: Any = kept.info("commandstats")
    before = reads["cmdstat_xrange"]["calls"]

    def has_read_on() -> bool:
        now: Any = kept.info("commandstats")
        return bool(now["cmdstat_xrange"]["calls"] >= before + 4 * WORKERS)

    wait_until(has_read_on)
