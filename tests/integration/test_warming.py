"""A fleet changes its embedder: the next log is warmed with what is decided meanwhile, and then the workers are replaced."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Final

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Verdict
from kp_scorer.store.store import stored_decisions

from tests.support.arena import wait_until_ended
from tests.support.builders import decision_on
from tests.support.changed_settings import with_changed
from tests.support.commands import command
from tests.support.fleet import start_fleet
from tests.support.outcomes import place_in_log, published
from tests.support.processes import FAST_WORKER, KP_SCORER_WORKER, PATIENCE_S, at_work, forked, wait_until
from tests.support.traces import fresh_samples, new_id, rows_in, short_traces

WINDOW: Final = 60
IN_FLIGHT: Final = 4  # The number of traces in flight in each worker.
DIGEST: Final = bytes(16)


@contextmanager
def under_load(settings: Settings, submitted: list[str]) -> Iterator[Callable[[], None]]:
    """Submit some 40 traces a second and add their ids to ``submitted``; yield the function that ends this."""
    ended = Event()

    def load() -> None:
        with Client(settings) as client:
            for trace in short_traces(5_000, seed=3):
                if ended.wait(0.025):
                    return
                submitted.append(client.submit(trace))

    thread = threading.Thread(target=load)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    try:
        yield stop
    finally:
        stop()


def filled(settings: Settings) -> dict[str, float]:
    """Return by space how much of its window each log fills, from 0 to 1."""
    return {row["space"]: row["window_filled"] for row in rows_in(command(settings, "cache", "info").stdout)}


@pytest.mark.slow
def test_a_fleet_under_load_changes_its_embedder_and_no_window_is_shorter(
    settings: Settings, store: Store, keys: Keys, redis_client: redis.Redis, tmp_path: Path
) -> None:
    old = with_changed(settings, novelty__max_elements=WINDOW, worker__concurrency=IN_FLIGHT)
    new, submitted = with_changed(old, embedding__embedder="words"), list[str]()
    with under_load(old, submitted) as stop_load:
        with start_fleet(old, tmp_path / "old", 3, FAST_WORKER) as fleet:
            wait_until(lambda: [*filled(old).values()] == [1])
            with forked("kp_scorer.cli", "cache", "warm", variables=as_environment(new)) as warming:
                wait_until(lambda: [*filled(old).values()] == [1, 1])
                assert set(fleet.stop()) == {0}
                warming.terminate()
                assert warming.wait(PATIENCE_S) == 0
        with start_fleet(new, tmp_path / "new", 3, KP_SCORER_WORKER) as fleet:
            wait_until(lambda: fleet.logged("trace_decided") > 2 * WINDOW)
            stop_load()
            wait_until_ended(new, submitted)

    decisions = {each.trace_id: each for each in stored_decisions(new)}
    assert decisions.keys() == set(submitted)
    assert store.ledger.counts() == (len(submitted), 0, len(submitted), 0)
    assert set(Counter(each["trace_id"] for each in published(new)).values()) == {1}
    old_log, next_log = ([each.trace_id for each in log.entries()] for log in store.novelty_logs())
    by_new = [each for each in decisions.values() if str(each.novelty.space).startswith("words")]
    first = min(map(place_in_log, by_new))
    before, after = next_log[: first - 1], next_log[first - 1 :]
    assert len(before) >= WINDOW
    assert set(after) == {each.trace_id for each in by_new}
    by_old = [each for each in old_log if each not in after]
    # Traces are copied in the order of their decisions. Some that were in flight when copying began were placed later.
    assert set(by_old[3 * IN_FLIGHT - len(before) :]) <= set(before), "a gap in the next log"
    assert set(before) <= set(by_old)
    assert len(next_log) == len(set(next_log))
    audited = command(new, "audit")
    assert audited.exit_code == 0, audited.stderr
    assert f"{len(by_new)} agree, 0 differ, {len(before)} undecided" in audited.stderr
    assert not redis_client.exists(keys.copies)


def test_copies_are_erased_and_so_are_the_vectors_that_their_reader_made(
    settings: Settings, store: Store, tmp_path: Path
) -> None:
    store.copies.begin(Event())
    with pytest.raises(ServiceUnavailable, match="another process"):
        store.copies.begin(Event())
    first, second = fresh_samples(2)
    with at_work(settings, tmp_path) as (_, client):
        for trace in (first, second):
            client.wait(client.submit(trace), timeout_s=PATIENCE_S)
    copies = store.copies.read(10)
    objectives = [each.trace.task.objective for each in copies if each.trace]
    assert objectives == [each["task"]["objective"] for each in (first, second)]
    assert command(settings, "forget", first["id"]).exit_code == 0
    assert [each.trace_id for each in store.copies.read(10)] == [second["id"]]
    assert store.copies.remove(copies) == [first["id"]]
    assert store.copies.read(10) == []


def decide(store: Store, copied: bytes) -> None:
    """Store a decision, with a copy of its trace."""
    trace_id = new_id()
    verdict = Verdict(trace_id, DIGEST, decision_on(trace_id), "", "code", is_known=True, trace=copied)
    assert store.ledger.commit([verdict]) == ["stored"]


def test_copies_begin_when_all_workers_make_them_and_end_when_they_outgrow_their_bound(
    store: Store, keys: Keys, redis_client: redis.Redis
) -> None:
    beginning = threading.Thread(target=store.copies.begin, args=[Event()])
    beginning.start()
    wait_until(lambda: redis_client.exists(keys.copies))
    decide(store, b"{}")
    beginning.join()
    assert store.copies.read(10) == []
    for _ in range(65):
        decide(store, bytes(2**20))
    assert not redis_client.exists(keys.copies)
    with pytest.raises(ServiceUnavailable, match="has a gap"):
        store.copies.read(10)
