"""What a worker's parts report is counted, and shown as Prometheus reads it, with labels whose number has a bound."""

import math
import socket
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.broker.backlog import Backlog
from kp_scorer.broker.task_message import SENT_MS, queued_s
from kp_scorer.decision import Decision
from kp_scorer.errors import REASONS, SettingsError
from kp_scorer.process.metrics import WorkerCollector
from kp_scorer.process.metrics_server import metrics_server
from kp_scorer.process.observer import OTHER, Ended, Observer
from kp_scorer.process.reporting import Condition
from kp_scorer.settings import MetricsSettings
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.builders import decision_on
from tests.support.metrics import Samples, exposition, samples_of
from tests.support.ports import free_port

NOTHING_WAITS = Backlog({"traces": 0}, {"decisions.accepted": 3, "decisions.rejected": 5}, ("decisions.rejected",), 2, 7.5, 0.5)
IDLE = Condition((), 0, {"embedder": "words", "engine": "python", "space": "words-1"}, 5, 0.25, NOTHING_WAITS, 1.0)


def decided(domain: str, **changed: Any) -> Decision:
    return Decision.model_validate_json(decision_on("kp:trace:1")).model_copy(update={"domain": domain, **changed})


def shown(observer: Observer, condition: Condition = IDLE) -> Samples:
    registry = CollectorRegistry()
    registry.register(WorkerCollector(observer.figures, lambda: condition))
    return samples_of(generate_latest(registry).decode())


def test_decisions_are_counted_by_outcome_and_by_the_domains_that_are_known() -> None:
    observer = Observer({"code"})
    accepted, rejected = decided("code", outcome="accepted", score=0.8), decided("kp:trace:x\n", outcome="rejected", score=0.2)
    observer.published([Ended(accepted, 2.0, 0.1), Ended(rejected, None, 0.1), Ended(rejected, 0.0, 0.2)])
    found = shown(observer)
    assert found['kp_scorer_decisions_total{domain="code",outcome="accepted"}'] == 1
    assert found[f'kp_scorer_decisions_total{{domain="{OTHER}",outcome="rejected"}}'] == 2
    assert found['kp_scorer_decisions_total{domain="code",outcome="review"}'] == 0
    assert not any("kp:trace" in name for name in found)
    assert (found["kp_scorer_score_count"], found['kp_scorer_score_bucket{le="0.2"}']) == (3, 2)
    assert (found["kp_scorer_queue_wait_seconds_count"], found["kp_scorer_queue_wait_seconds_sum"]) == (2, 2.0)
    assert found["kp_scorer_processing_seconds_sum"] == pytest.approx(0.4)


def test_every_other_report_is_counted() -> None:
    observer = Observer(())
    for deliveries in (1, 1, 3):
        observer.delivered(deliveries)
    observer.prepared(32, look_up_s=0.001, embed_s=0.2, tokens=9_000)
    observer.finished(0.003)
    observer.buried("conflict")
    observer.resent()
    found = shown(observer)
    assert (found["kp_scorer_deliveries_total"], found["kp_scorer_redeliveries_total"]) == (3, 1)
    assert (found["kp_scorer_tokens_total"], found["kp_scorer_resends_total"]) == (9_000, 1)
    assert (found['kp_scorer_batch_traces_bucket{le="16"}'], found['kp_scorer_batch_traces_bucket{le="32"}']) == (0, 1)
    assert (found["kp_scorer_embed_seconds_sum"], found["kp_scorer_look_up_seconds_sum"]) == (0.2, 0.001)
    assert found["kp_scorer_finish_seconds_count"] == 1
    letters = {reason: found[f'kp_scorer_dead_letters_total{{reason="{reason}"}}'] for reason in REASONS}
    assert letters == {reason: float(reason == "conflict") for reason in REASONS}


def test_how_the_worker_is_and_what_waits_is_shown() -> None:
    found = shown(Observer(()))
    assert (found["kp_scorer_ready"], found["kp_scorer_degraded"], found["kp_scorer_window_entries"]) == (1, 0, 5)
    assert (found["kp_scorer_pending"], found["kp_scorer_oldest_pending_seconds"]) == (2, 7.5)
    assert found['kp_scorer_queue_messages{kind="decisions",queue="decisions.rejected"}'] == 5
    full = {name: found[f'kp_scorer_results_full{{queue="{name}"}}'] for name in NOTHING_WAITS.decisions}
    assert full == {"decisions.accepted": 0, "decisions.rejected": 1}
    (info,) = (name for name in found if name.startswith("kp_scorer_info{"))
    assert 'engine="python"' in info


def test_what_was_not_looked_at_yet_is_not_shown_as_nothing() -> None:
    found = shown(Observer(()), IDLE._replace(backlog=None, embedder={}))
    assert not {"kp_scorer_pending", "kp_scorer_oldest_pending_seconds"} & set(found)
    assert found["kp_scorer_backlog_age_seconds"] == 1, "or nobody would be told that nobody gets to look"
    assert found["kp_scorer_degraded"] == 1


def test_what_redis_does_not_say_is_not_shown_as_nothing() -> None:
    found = shown(Observer(()), IDLE._replace(backlog=NOTHING_WAITS._replace(redis_used=None)))
    assert "kp_scorer_redis_memory_used_ratio" not in found
    assert found["kp_scorer_pending"] == 2


@given(st.lists(st.floats(0, 1), min_size=1))
def test_buckets_count_what_is_at_most_their_bound(scores: Sequence[float]) -> None:
    observer = Observer(())
    observer.published([Ended(decided("code", score=score), None, 0.0) for score in scores])
    spread = observer.figures().score
    assert spread.buckets == tuple((bound, sum(score <= bound for score in scores)) for bound, _ in spread.buckets)
    assert (spread.count, spread.buckets[-1][0]) == (len(scores), math.inf)
    assert spread.total == pytest.approx(sum(scores))


def test_no_report_is_lost_whichever_thread_makes_it() -> None:
    observer = Observer(())

    def report() -> None:
        for _ in range(2_000):
            observer.delivered(2)

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (observer.figures().deliveries, observer.figures().redeliveries) == (8_000, 8_000)


@pytest.mark.parametrize(
    ("sent_ms", "queued"),
    [(98_500, 1.5), (101_000, 0.0), (None, None), ("98500", None), (-1, None), (2**70, None), (98.5, None), ([], None)],
)
def test_how_long_a_message_was_queued_is_what_it_says_if_that_makes_sense(sent_ms: Any, queued: float | None) -> None:
    assert queued_s(SimpleNamespace(headers={} if sent_ms is None else {SENT_MS: sent_ms}), 100.0) == queued


def test_one_that_asks_and_does_not_go_on_keeps_nobody_else_from_reading() -> None:
    settings = MetricsSettings(port=free_port())
    collector = WorkerCollector(Observer(()).figures, lambda: IDLE)
    url = f"http://127.0.0.1:{settings.port}"
    with metrics_server(settings, collector), socket.create_connection(("127.0.0.1", settings.port)) as stuck:
        stuck.sendall(b"GET /metrics HTTP/1.1\r\n")
        started = time.monotonic()
        found = samples_of(exposition(f"{url}/metrics"))
        assert found["kp_scorer_ready"] == 1
        assert "process_cpu_seconds_total" in found
        assert time.monotonic() - started < 5
        with pytest.raises(OSError, match="404"):
            exposition(f"{url}/")
        with pytest.raises(SettingsError, match=r"metrics\.port"), metrics_server(settings, collector):
            pass
    with pytest.raises(OSError, match="refused"):
        exposition(f"{url}/metrics")
