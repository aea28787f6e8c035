"""The metrics of a worker: what it has done, and what waits for others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings

from tests.support.changed_settings import with_changed
from tests.support.processes import FAST_WORKER, free_port, start_worker, wait_until
from tests.support.prometheus import Samples, scraped
from tests.support.traces import fresh_samples


def total(samples: Samples, name: str) -> float:
    """The sum over all labels."""
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == name)


@pytest.fixture
def _limited(redis_client: redis.Redis) -> Iterator[None]:
    redis_client.config_set("maxmemory", 10**9)
    yield
    redis_client.config_set("maxmemory", 0)


@pytest.mark.usefixtures("_limited")
def test_a_worker_shows_metrics_of_its_work_and_of_the_backlog(
    settings: Settings, redis_client: redis.Redis, tmp_path: Path
) -> None:
    measured = with_changed(settings, metrics__port=free_port())

    def samples_with(name: str, value: float) -> Samples:
        samples = scraped(measured)
        return samples if total(samples, name) == value else {}

    traces = fresh_samples(20)
    with Client(settings) as client, start_worker(measured, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        client.submit_many(traces)
        redis_client.lpush("traces", '{"@type": "nothing that is known"}')
        assert len(list(client.as_completed([str(trace["id"]) for trace in traces], timeout_s=30))) == 20
        wait_until(lambda: worker.events("trace_dead"))
        samples = wait_until(lambda: samples_with("kp_scorer_decisions_total", 20))
        assert samples["kp_scorer_queue_wait_seconds_count"] == samples["kp_scorer_processing_seconds_count"] == 20
        assert 0 < samples["kp_scorer_processing_seconds_sum"] < 60
        assert samples["kp_scorer_batch_traces_sum"] == samples["kp_scorer_window_entries"] == 20
        assert (samples["kp_scorer_deliveries_total"], samples["kp_scorer_redeliveries_total"]) == (21, 0)
        assert samples['kp_scorer_dead_letters_total{reason="invalid"}'] == total(samples, "kp_scorer_dead_letters_total") == 1
        assert (samples["kp_scorer_ready"], samples["kp_scorer_degraded"]) == (1, 0)
        assert samples["kp_scorer_mirror_lag_seconds"] < 10
        samples = wait_until(lambda: samples_with("kp_scorer_queue_messages", 20), timeout_s=30)
        assert (samples["kp_scorer_pending"], samples["kp_scorer_oldest_pending_seconds"]) == (0, 0)
        assert 1e-4 < samples["kp_scorer_redis_memory_used_ratio"] < 0.1
    assert worker.process.returncode == 0
