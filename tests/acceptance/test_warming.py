"""A change of the model: the new space is warmed; and what a worker with the model holds in memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.novelty.audit import audit
from kp_scorer.settings import Settings

from tests.support.arena import submit
from tests.support.builders import minimal_payload
from tests.support.changed_settings import with_changed
from tests.support.commands import run
from tests.support.processes import FAST_WORKER, Worker, start_worker
from tests.support.traces import fresh_samples, jsonl, new_id, rows_in

Payload = dict[str, Any]


def decide(settings: Settings, traces: Sequence[Payload]) -> list[Payload]:
    """Submit traces, and give what their decisions say of novelty."""
    with Client(settings) as client:
        ids = submit(client, traces)
        return [client.wait(trace_id, timeout_s=60).novelty.model_dump() for trace_id in ids]


@pytest.mark.slow
def test_warmed_space_has_the_traces_scored_before(settings: Settings, store: Store, tmp_path: Path) -> None:
    *decided, unseen = traces = fresh_samples(5)
    at_redis = {"KP_BROKER_URL": settings.broker.url}
    with start_worker(settings, tmp_path / "before.log", command=FAST_WORKER):
        decide(settings, decided)
    (old_log,) = store.novelty_logs()

    # One trace too many for the window, and one whose id has another content.
    conflicting = minimal_payload(trace_id=decided[0]["id"])
    small = ("--set", f"novelty.max_elements={len(traces) + 1}")
    warmed = run("cache", "warm", "-", *small, stdin=jsonl(*fresh_samples(1), conflicting, "none", *traces), **at_redis)
    assert warmed.returncode == 1, warmed.stderr
    invalid, conflict, result = rows_in(warmed.stdout)
    assert (invalid["line"], conflict["trace_id"], conflict["state"]) == (3, conflicting["id"], "conflict")
    assert (result["warmed"], result["entries"]) == (5, 5)
    (new_log,) = (log for log in store.novelty_logs() if log.space != old_log.space)
    assert (new_log.space, new_log.info().entries) == (result["space"], 5)
    again = run("cache", "warm", "-", stdin=jsonl(*traces), **at_redis)
    assert (again.returncode, again.stdout) == (2, "")
    assert "has 5 entries already" in again.stderr

    # In the order of submission: a copy that is decided later would be compared with none that old.
    few = with_changed(settings, novelty__max_elements=len(traces) + 1, worker__concurrency=1)
    with start_worker(few, tmp_path / "after.log"):
        copies = [trace | {"id": new_id()} for trace in traces]
        novelty_of_copies = decide(few, copies)
        (novelty_of_unseen,) = decide(few, [unseen])
    assert [novelty["duplicate_of"] for novelty in novelty_of_copies] == [trace["id"] for trace in traces]
    assert novelty_of_unseen["duplicate_of"] is None, "it was compared with itself"
    report = audit(list(new_log.entries()), store.ledger.decided, few.novelty.window(), lambda done, total: None)
    assert (report.agreeing, report.differences) == (6, [])
    assert store.ledger.counts()[:3] == (10, 0, 10)
    forgotten = json.loads(run("forget", decided[1]["id"], **at_redis).stdout)
    assert forgotten["vectors"] == 2


def test_a_ready_worker_holds_no_torch_and_little_memory(worker: Worker) -> None:
    process = psutil.Process(worker.process.pid)
    (loaded,) = worker.events("embedder_loaded")
    assert loaded["engine"].startswith("openvino")
    assert not [mapped.path for mapped in process.memory_maps() if "torch" in mapped.path]
    # Weights take twice as much where the processor has no bfloat16.
    assert process.memory_info().rss < (450e6 if "bf16" in loaded["engine"] else 600e6)
    # Nor what exports spans, which otel.enabled does not ask for.
    assert not [mapped.path for mapped in process.memory_maps() if "google/_upb" in mapped.path]
