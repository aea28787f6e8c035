"""Workers that are killed without warning change no score, decide nothing twice and lose nothing."""

import random
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from tests.fleet import audited, log_entries, published, short_traces
from tests.processes import FAST_WORKER, Worker, launch_worker
from worker.client import Client
from worker.settings import Settings, load_settings

SEED = 20261121
TRACES = 2_000
WORKERS = 4
VISIBILITY_S = 10


@pytest.fixture
def impatient(settings: Settings) -> Settings:
    """Settings under which what a dead worker held comes back soon."""
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    return load_settings({**urls, "broker.visibility_timeout_s": VISIBILITY_S})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_kills_every_second_leave_one_decision_and_one_entry_a_trace(
    impatient: Settings, client: redis.Redis, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    traces = {str(trace["id"]): trace for trace in short_traces(TRACES, SEED)}
    waiting = list(traces)
    pending: set[str] = set()
    kills = 0
    with ExitStack() as stack, Client(impatient) as submitter:
        fleet = [_launch(impatient, tmp_path, stack) for _ in range(WORKERS)]
        fleet[0].wait_until_ready()
        progress = time.monotonic()
        while waiting or pending:
            victim = chance.randrange(WORKERS)
            fleet[victim].process.kill()
            kills += 1
            fleet[victim] = _launch(impatient, tmp_path, stack)
            # Enough to keep the fleet busy for the next second, so that kills meet batches at every stage.
            for trace_id in waiting[:150]:
                submitter.submit(traces[trace_id])
                pending.add(trace_id)
            del waiting[:150]
            settled = {status.trace_id for status in submitter.as_settled(sorted(pending), timeout_s=1.0)}
            pending -= settled
            if settled:
                progress = time.monotonic()
            elif time.monotonic() - progress > VISIBILITY_S + 5:
                # Celery's Redis transport loses what a worker has popped and not yet noted when it dies, so no
                # redelivery will come; submitting again is always safe.
                for trace_id in pending:
                    submitter.submit(traces[trace_id])
                progress = time.monotonic()
            assert kills < 180, f"{len(pending)} still pending"
        statuses = [status for status in submitter.look_up(list(traces)) if status]
    assert kills >= 10
    assert {status.state for status in statuses} == {"decided"}
    assert len(statuses) == TRACES

    entries = Counter(entry.trace_id for entry in log_entries(impatient, client))
    assert entries == Counter(traces.keys())
    report = audited(impatient, client)
    assert report.differences == []
    assert (report.agreeing, report.undecided, report.beyond) == (TRACES, 0, 0)

    standing = {status.trace_id: status.decision for status in statuses}
    decisions = published(impatient)
    assert {decision["trace_id"] for decision in decisions} == traces.keys()
    for decision in decisions:
        stored = standing[decision["trace_id"]]
        assert stored is not None
        assert decision == stored.model_dump(mode="json")


def _launch(settings: Settings, directory: Path, stack: ExitStack) -> Worker:
    number = len(list(directory.iterdir()))
    worker = launch_worker(settings, directory / f"worker-{number}.log", FAST_WORKER)
    stack.callback(worker.stop)
    return worker
