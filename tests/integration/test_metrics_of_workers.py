"""What a worker shows of what it did, and of what waits for others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings

from tests.support.metrics import Samples, scraped
from tests.support.ports import free_port
from tests.support.processes import FAST_WORKER, launch_worker, start_worker, wait_until
from tests.support.traces import fresh_samples


def total(found: Samples, name: str) -> float:
    """The sum over all labels."""
    return sum(value for sample, value in found.items() if sample.partition("{")[0] == name)


@pytest.fixture
def _limited(redis_client: redis.Redis) -> Iterator[None]:
    redis_client.config_set("maxmemory", 10**9)
    yield
    redis_client.config_set("maxmemory", 0)


@pytest.mark.usefixtures("_limited")
def test_a_worker_shows_what_it_did_and_what_waits(settings: Settings, redis_client: redis.Redis, tmp_path: Path) -> None:
    shown_at = settings.model_copy(update={"metrics": settings.metrics.model_copy(update={"port": free_port()})})
    traces = fresh_samples(20)
    with Client(settings) as client, start_worker(shown_at, tmp_path / "worker.log", command=FAST_WORKER) as worker:
        client.submit_many(traces)
        redis_client.lpush("traces", '{"@type": "nothing that is known"}')
        for _ in client.as_settled([str(trace["id"]) for trace in traces], timeout_s=30):
            pass
        wait_until(lambda: worker.events("trace_dead"))
        found = wait_until(lambda: shown if total(shown := scraped(shown_at), "kp_scorer_decisions_total") == 20 else {})
        assert found["kp_scorer_queue_wait_seconds_count"] == found["kp_scorer_processing_seconds_count"] == 20
        assert 0 < found["kp_scorer_processing_seconds_sum"] < 60
        assert found["kp_scorer_batch_traces_sum"] == found["kp_scorer_window_entries"] == 20
        assert (found["kp_scorer_deliveries_total"], found["kp_scorer_redeliveries_total"]) == (21, 0)
        assert found['kp_scorer_dead_letters_total{reason="invalid"}'] == total(found, "kp_scorer_dead_letters_total") == 1
        assert (found["kp_scorer_ready"], found["kp_scorer_degraded"]) == (1, 0)
        assert found["kp_scorer_mirror_lag_seconds"] < 10
        second = launch_worker(shown_at, tmp_path / "second.log", FAST_WORKER)
        assert second.process.wait(60) == 2
        assert "metrics.port" in second.text()
        found = wait_until(
            lambda: shown if total(shown := scraped(shown_at), "kp_scorer_queue_messages") == 20 else {}, timeout_s=30
        )
        assert (found["kp_scorer_pending"], found["kp_scorer_oldest_pending_seconds"]) == (0, 0)
        assert 1e-4 < found["kp_scorer_redis_memory_used_ratio"] < 0.1
        redis_client.config_set("maxmemory", 0)
        wait_until(lambda: not scraped(shown_at)["kp_scorer_redis_memory_used_ratio"], timeout_s=30)
    assert worker.process.returncode == 0
