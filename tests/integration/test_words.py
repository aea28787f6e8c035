"""The embedder of words in workers and commands: its log is separate, and is warmed, audited and erased like others."""

import json
import unicodedata
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from kp_scorer.client import Client
from kp_scorer.errors import TraceConflict
from kp_scorer.novelty.verification import audit
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store

from tests.support.arena import submit
from tests.support.builders import minimal_payload
from tests.support.changed_settings import settings_at, with_changed
from tests.support.commands import command, run
from tests.support.processes import KP_SCORER_WORKER, PATIENCE_S, at_work, slowness
from tests.support.traces import fresh_samples, jsonl, new_id, rows_in

SPACE: Final = "words-3.asked_and_did.1"
_HEAP_BYTES: Final = 64 * 1024 * 1024
MODELS: Final = ("openvino", "sentence_transformers", "tokenizers", "torch")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return with_changed(settings, embedding__embedder="words")


@pytest.fixture
def base_install(tmp_path: Path) -> dict[str, str]:
    """The variables with which packages outside the base install cannot be imported."""
    blocked = "".join(f"; sys.modules[{name!r}] = None" for name in MODELS)
    (tmp_path / "sitecustomize.py").write_text(f"import sys{blocked}")
    return {"PYTHONPATH": str(tmp_path)}


def arenas_of(pid: int) -> int:
    """Return the number of malloc's arenas beside the main one. Each begins as 64 MiB of addresses, of which a part is used."""
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, access = line.split()[:2]
        start, end = (int(address, 16) for address in addresses.split("-"))
        regions.append((start, end, access))
    return sum(
        (start % _HEAP_BYTES, end - start, used, unused) == (0, _HEAP_BYTES, "rw-p", "---p")
        for (start, _, used), (_, end, unused) in pairwise(regions)
    )


def test_a_worker_decides_as_score_does_and_its_log_is_audited(
    settings: Settings, store: Store, base_install: dict[str, str], tmp_path: Path
) -> None:
    samples = fresh_samples(20)
    traces = [*samples, samples[3] | {"id": new_id()}]
    variables = as_environment(settings) | base_install
    with at_work(settings, tmp_path, command=KP_SCORER_WORKER, variables=base_install) as (worker, client):
        for trace in traces:
            client.submit(trace)
        decisions = [client.wait(trace["id"], timeout_s=PATIENCE_S) for trace in traces]
        assert psutil.Process(worker.process.pid).memory_info().rss < 150e6
        assert arenas_of(worker.process.pid) == 1, "shared by all threads but the main one"
        (loaded,) = worker.logged("embedder_loaded")
    assert (loaded["embedder"], loaded["space"]) == ("words", SPACE)
    assert loaded["duration_ms"] < 1_000 or loaded["duration_ms"] < 1_000 * slowness()
    assert [decision.novelty.source for decision in decisions] == ["empty_cache", *["embedding"] * 20]
    assert {decision.novelty.space for decision in decisions} == {SPACE}
    assert decisions[-1].novelty.duplicate_of == samples[3]["id"]

    offline = rows_in(run("score", "-", stdin=jsonl(*traces), **variables).stdout)
    assert [decision.score for decision in decisions] == pytest.approx([row["score"] for row in offline], abs=1e-6)
    doctor = run("doctor", **variables)
    assert {"check": "embedder", "state": "ok", "detail": "in order"} in rows_in(doctor.stdout)
    audited = command(settings, "audit")
    assert audited.exit_code == 0, audited.stderr
    assert f"{SPACE}: 21 entries, 21 agree, 0 differ" in audited.stderr
    assert json.loads(command(settings, "forget", samples[0]["id"]).stdout)["vectors"] == 1
    assert store.novelty_log(SPACE).info().entries == 20


def test_copies_in_other_normal_forms_are_rejected_and_under_one_id_conflict(settings: Settings, tmp_path: Path) -> None:
    settings = with_changed(settings, scoring__copies="reject", scoring__min_novelty=0.1)
    first = minimal_payload(trace_id=new_id(), objective="Größe der Übergabe prüfen")
    look_alike = first | {"task": {"objective": unicodedata.normalize("NFD", "Größe  der Über\u200bgabe prüfen")}}
    full_width = first | {"id": new_id(), "task": {"objective": "ＧＲÖẞＥ der Übergabe prüfen"}}
    with at_work(settings, tmp_path, command=KP_SCORER_WORKER) as (_, client):
        submit(client, [first])
        client.wait(first["id"], timeout_s=PATIENCE_S)
        copy, wide = (
            client.wait(each, timeout_s=PATIENCE_S) for each in submit(client, [look_alike | {"id": new_id()}, full_width])
        )
        with pytest.raises(TraceConflict):
            client.submit(look_alike)
    assert (copy.outcome, copy.novelty.duplicate_of) == ("rejected", first["id"])
    assert (wide.outcome, wide.novelty.duplicate_of) == ("rejected", None)
    assert wide.dimensions.novelty == pytest.approx(0, abs=1e-6)
    assert command(settings, "audit").exit_code == 0


def decide(client: Client, *traces: dict[str, Any]) -> list[Any]:
    """Submit traces; return, for each, the earlier trace that it repeats."""
    return [client.wait(trace_id, timeout_s=PATIENCE_S).novelty.duplicate_of for trace_id in submit(client, traces)]


def test_after_a_change_of_the_embedder_a_warmed_space_has_the_traces_scored_before(
    redis_url: str, settings: Settings, store: Store, tmp_path: Path
) -> None:
    *decided, unseen = traces = fresh_samples(5)
    with at_work(settings_at(redis_url), tmp_path) as (_, client):
        decide(client, *decided)
    (old_log,) = store.novelty_logs()

    # The valid traces are one more than the window holds, and one has an id under which the ledger has other content.
    conflicting = minimal_payload(trace_id=decided[0]["id"])
    small = ("--set", f"novelty.max_elements={len(traces) + 1}")
    warmed = command(settings, "cache", "warm", "-", *small, stdin=jsonl(*fresh_samples(1), conflicting, "none", *traces))
    assert warmed.exit_code == 1, warmed.stderr
    invalid, conflict, result = rows_in(warmed.stdout)
    assert (invalid["line"], conflict["trace_id"], conflict["state"]) == (3, conflicting["id"], "conflict")
    assert (result["warmed"], result["entries"]) == (5, 5)
    (new_log,) = (log for log in store.novelty_logs() if log.space != old_log.space)
    assert (new_log.space, new_log.info().entries) == (result["space"], 5)
    again = command(settings, "cache", "warm", "-", stdin=jsonl(*traces))
    assert (again.exit_code, again.stdout) == (2, "")
    assert "has 5 entries already" in again.stderr

    # A single worker slot keeps the order of submission: a copy decided later would have lost its original from the window.
    few = with_changed(settings, novelty__max_elements=len(traces) + 1, worker__concurrency=1)
    with at_work(few, tmp_path, command=KP_SCORER_WORKER) as (_, client):
        assert decide(client, *(trace | {"id": new_id()} for trace in traces)) == [trace["id"] for trace in traces]
        assert decide(client, unseen) == [None], "it was compared with itself"
    report = audit(list(new_log.entries()), store.ledger.decided, few.novelty.window(), lambda done, total: None)
    assert (report.agreeing, report.differences) == (6, [])
    assert store.ledger.counts()[:3] == (10, 0, 10)
    forgotten = json.loads(command(settings, "forget", decided[1]["id"]).stdout)
    assert forgotten["vectors"] == 2
