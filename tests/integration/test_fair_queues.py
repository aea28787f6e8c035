"""With several queues of traces, each producer gets its share of the workers, however much waits in the other queues."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.errors import QueueFull, SettingsError
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.changed_settings import SettingsWith, with_changed
from tests.support.outcomes import check
from tests.support.processes import FAST_WORKER, PATIENCE_S, Worker, at_work, start_worker, wait_until
from tests.support.rabbitmq import declare_as_worker
from tests.support.traces import new_id, short_traces

BACKLOG = 4_000
BURST = 400
SLOW = {"EMBED_S": "0.002"}


@pytest.fixture
def shared(on_broker: SettingsWith) -> Settings:
    """Settings with two queues of traces, one with twice the weight of the other."""
    first = on_broker().queues.first
    queues = {f"{first}.large": {"weight": 2}, f"{first}.small": {"weight": 1}}
    return on_broker(queues__traces=queues, worker__concurrency=24, broker__visibility_timeout_s=3)


@contextmanager
def clients(settings: Settings) -> Iterator[Sequence[Client]]:
    """Open a client of each queue."""
    large, small = settings.queues.traces
    with Client(settings, queue=large) as of_large, Client(settings, queue=small) as of_small:
        yield of_large, of_small


def copies(count: int) -> list[dict[str, Any]]:
    """Return short traces with ids of their own, which are quick to make."""
    (trace,) = short_traces(1, seed=1)
    return [trace | {"id": new_id(), "task": {"objective": f"task {number}"}} for number in range(count)]


def submitted(client: Client, count: int) -> list[str]:
    return [str(each) for each in client.submit_many(copies(count))]


def decided(worker: Worker) -> list[str]:
    """Return the ids of the traces that a worker has decided, in the order of its log."""
    return [str(event["trace_id"]) for event in worker.events("trace_decided")]


def test_a_backlog_of_one_producer_leaves_another_its_share(shared: Settings, tmp_path: Path, store: Store) -> None:
    unread = with_changed(shared, results__publish=())
    declare_as_worker(unread)
    with clients(unread) as (large, small):
        submitted(large, BACKLOG)
        with at_work(unread, tmp_path, variables=SLOW) as (worker, _):
            wait_until(lambda: decided(worker))
            burst = submitted(small, BURST)
            assert {status.state for status in small.as_completed(burst, PATIENCE_S)} == {"decided"}
            assert store.ledger.counts().pending > BACKLOG / 4, "the backlog was gone before"
            # Workers log a decision only after they have stored it.
            wait_until(lambda: {*burst} <= {*decided(worker)})
            order = decided(worker)
    # The burst's queue gets a third of the worker, so the worker decides three traces for each one of the burst.
    places = [place for place, trace_id in enumerate(order) if trace_id in {*burst}]
    assert len(places) == BURST
    assert places[-1] - places[0] < 1.2 * 3 * BURST


def test_full_queues_share_by_weight(shared: Settings, tmp_path: Path) -> None:
    declare_as_worker(shared)
    with clients(shared) as (large, small):
        of_large = {*submitted(large, BURST), *submitted(large, BURST)}
        submitted(small, BURST)
        # Batches are slow enough for a busy broker to keep up. Otherwise its order of delivery would decide the shares.
        with at_work(with_changed(shared, worker__concurrency=96), tmp_path, variables={"EMBED_S": "0.05"}) as (worker, _):
            # The broker does not deliver from both queues from the same moment on, so skip the first decisions.
            wait_until(lambda: len(decided(worker)) >= 100 + BURST)
            order = decided(worker)[100 : 100 + BURST]
    assert sum(each in of_large for each in order) == pytest.approx(BURST * 2 / 3, rel=0.1)


def test_nothing_is_lost_as_queues_come_and_go_and_workers_are_killed(
    shared: Settings, on_broker: SettingsWith, tmp_path: Path
) -> None:
    large, small = shared.queues.traces
    grown = with_changed(shared, queues__traces={large: {}, f"{small}.new": {}, small: {}})
    declare_as_worker(grown)
    with clients(shared) as (of_large, of_small), Client(grown, queue=f"{small}.new") as of_new:
        all_ids = [*submitted(of_large, 100), *submitted(of_small, 100), *submitted(of_new, 100)]
        for number, settings in enumerate((shared, grown)):
            with start_worker(settings, tmp_path / f"{number}.log", command=FAST_WORKER, variables=SLOW) as worker:
                wait_until(lambda: len(decided(worker)) >= 20)
                worker.process.kill()
        with at_work(grown, tmp_path), make_celery(grown) as app, Store.open(grown) as store:
            assert len(list(of_new.as_completed(all_ids, PATIENCE_S))) == len(all_ids)
            assert {*grown.queues.traces} <= {*look_at_backlog(app, grown, store, ()).submissions}
        # An empty queue may be removed from the settings.
        with at_work(with_changed(shared, queues__traces=small), tmp_path) as (_, client):
            all_ids.append(submitted(client, 1)[0])
            client.wait(all_ids[-1], PATIENCE_S)
    check(grown, all_ids)


def test_a_queue_refuses_messages_beyond_its_limit_and_other_queues_do_not(shared: Settings, store: Store) -> None:
    large, small = shared.queues.traces
    limited = with_changed(shared, queues__traces={large: {"limit": 150}, small: {}})
    declare_as_worker(limited)
    with clients(limited) as (of_large, of_small):
        with pytest.raises(QueueFull, match=large):
            submitted(of_large, 1_000)
        noted = store.ledger.counts().pending
        assert 150 <= noted <= 200, "the ledger takes up what is refused"
        assert len(submitted(of_small, 300)) == 300
        with pytest.raises(QueueFull):
            of_large.submit(copies(1)[0])
        assert store.ledger.counts().pending == noted + 300
    with pytest.raises(SettingsError, match=f"^queue: expected one of {large}, {small}, as"):
        Client(limited, queue="other")
