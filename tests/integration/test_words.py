"""The embedder without a model, in workers and commands: a log of its own, warmed, audited and forgotten like others."""

import json
from pathlib import Path
from typing import Final

import psutil
import pytest
from kp_scorer import score_traces
from kp_scorer.client import Client
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings, load_settings
from kp_scorer.settings.loading import as_environment

from tests.support.changed_settings import with_changed
from tests.support.commands import run
from tests.support.processes import start_worker
from tests.support.traces import fresh_samples, jsonl, new_id, rows_in

SPACE: Final = "words-1.asked_and_did.1"
MODELS: Final = ("openvino", "sentence_transformers", "tokenizers", "torch")


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return with_changed(settings, embedding__embedder="words", embedding__required=True)


@pytest.fixture
def base_install(tmp_path: Path) -> dict[str, str]:
    """Variables under which no package can be imported that the base install does not bring."""
    blocked = "".join(f"; sys.modules[{name!r}] = None" for name in MODELS)
    (tmp_path / "sitecustomize.py").write_text(f"import sys{blocked}")
    return {"PYTHONPATH": str(tmp_path)}


def test_a_worker_decides_as_score_does_and_its_log_is_audited(
    settings: Settings, store: Store, base_install: dict[str, str], tmp_path: Path
) -> None:
    samples = fresh_samples(20)
    traces = [*samples, samples[3] | {"id": new_id()}]
    variables = as_environment(settings) | base_install
    with start_worker(settings, tmp_path / "worker.log", variables=base_install) as worker, Client(settings) as client:
        for trace in traces:
            client.submit(trace)
        decisions = [client.wait(trace["id"], timeout_s=60) for trace in traces]
        assert psutil.Process(worker.process.pid).memory_info().rss < 150e6
        (loaded,) = worker.events("embedder_loaded")
    assert (loaded["embedder"], loaded["space"]) == ("words", SPACE)
    assert loaded["duration_ms"] < 1_000
    assert [decision.novelty.source for decision in decisions] == ["empty_cache", *["embedding"] * 20]
    assert {decision.novelty.space for decision in decisions} == {SPACE}
    assert decisions[-1].novelty.duplicate_of == samples[3]["id"]

    offline = rows_in(run("score", "-", stdin=jsonl(*traces), **variables).stdout)
    assert [decision.score for decision in decisions] == pytest.approx([row["score"] for row in offline], abs=1e-6)
    audited = run("audit", **variables)
    assert audited.returncode == 0, audited.stderr
    assert f"{SPACE}: 21 entries, 21 agree, 0 differ" in audited.stderr
    assert json.loads(run("forget", samples[0]["id"], **variables).stdout)["vectors"] == 1
    assert store.novelty_log(SPACE).info().entries == 20


def test_a_log_is_warmed_for_it(settings: Settings, base_install: dict[str, str], tmp_path: Path) -> None:
    traces = fresh_samples(5)
    variables = as_environment(settings) | base_install
    warmed = run("cache", "warm", "-", stdin=jsonl(*traces), **variables)
    assert json.loads(warmed.stdout) == {"space": SPACE, "warmed": 5, "entries": 5}
    copy = traces[2] | {"id": new_id()}
    with start_worker(settings, tmp_path / "worker.log", variables=base_install), Client(settings) as client:
        client.submit(copy)
        assert client.wait(copy["id"], timeout_s=60).novelty.duplicate_of == traces[2]["id"]


def test_doctor_has_nothing_to_say_of_it(settings: Settings, base_install: dict[str, str]) -> None:
    done = run("doctor", **as_environment(settings), **base_install)
    assert {"check": "embedder", "state": "ok", "detail": "in order"} in rows_in(done.stdout)


def test_demo_decides_with_it_in_the_base_install(base_install: dict[str, str]) -> None:
    done = run("demo", "--set", "embedding.embedder=words", **base_install)
    assert done.returncode == 0, done.stderr
    assert "repeats" in done.stdout
    assert "there is no embedder" not in done.stderr


def test_thresholds_are_calibrated_on_its_scores() -> None:
    traces = [trace for _ in range(8) for trace in fresh_samples(48)]
    target = ("--accept", "20%", "--output", "-", "--set", "embedding.embedder=words")
    calibrated = run("calibrate", "-", *target, stdin=jsonl(*traces))
    assert calibrated.returncode == 0, calibrated.stderr
    assert "[scoring" in calibrated.stdout


def test_its_scores_are_the_references_but_for_novelty() -> None:
    traces = fresh_samples(48)
    by_words, without = (list(score_traces(traces, load_settings({"embedding.embedder": name}))) for name in ("words", "none"))
    assert len({decision.dimensions.novelty for decision in by_words}) > 20
    for ours, others in zip(by_words, without, strict=True):
        assert ours.dimensions.model_copy(update={"novelty": 0.5}) == others.dimensions
