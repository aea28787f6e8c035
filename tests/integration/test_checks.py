"""With checks, whatever they do, a worker decides every trace, and nothing reveals what the checks must not reveal."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import psutil
from kp_scorer.client import Client
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.builders import minimal_payload
from tests.support.changed_settings import with_changed
from tests.support.outcomes import audited
from tests.support.own_checks import MARKER, install
from tests.support.planted import SECRETS
from tests.support.processes import FAST_WORKER, PATIENCE_S, Worker, at_work, free_port, start_worker, wait_until
from tests.support.prometheus import scraped

TOKENS: Final = [SECRETS["GitHub token"](random.Random(seed)) for seed in range(5)]


def submitted(client: Client, *objectives: str, **content: Any) -> dict[str, Decision]:
    """Submit traces, and return their decisions by the first word of the objective, in the order of submission."""
    ids = {f"kp:trace:{number}-{text.split()[0]}": text for number, text in enumerate(objectives)}
    client.submit_many([minimal_payload(trace_id=trace_id, objective=text, **content) for trace_id, text in ids.items()])
    return {trace_id.partition("-")[2]: client.wait(trace_id, timeout_s=PATIENCE_S) for trace_id in ids}


def process_of_checks(worker: Worker) -> psutil.Process:
    children = psutil.Process(worker.process.pid).children()
    (child,) = [child for child in children if "kp_scorer.checks.answering" in child.cmdline()]
    return child


def test_secrets_are_counted_and_rejected_and_appear_nowhere(settings: Settings, tmp_path: Path) -> None:
    settings = with_changed(settings, checks__secrets="reject", scoring__threshold=0.0, metrics__port=free_port())
    with at_work(settings, tmp_path) as (worker, client), Store.open(settings) as store:
        leaking = submitted(client, *(f"leak{seed} of {token}" for seed, token in enumerate(TOKENS)))
        clean = submitted(client, "clean and harmless", "also clean")
        assert [decision.outcome for decision in leaking.values()] == ["rejected"] * len(TOKENS)
        assert {tuple(decision.checks[0].kinds.items()) for decision in leaking.values()} == {(("github-pat", 1),)}
        assert [(each.outcome, each.checks[0].kinds) for each in clean.values()] == [("accepted", {})] * 2
        samples = wait_until(
            lambda: samples if (samples := scraped(settings))["kp_scorer_checks_seconds_count"] == len(TOKENS) + 2 else {}
        )
        assert samples['kp_scorer_check_findings_total{check="secrets"}'] == len(TOKENS)
        assert samples['kp_scorer_check_failures_total{check="secrets",failure="timeout"}'] == 0
        revealed = f"{worker.text()} {samples} {leaking}"
        assert [token for token in TOKENS if token in revealed] == []
        assert audited(settings, store).differences == []
        child = process_of_checks(worker)
    assert worker.process.returncode == 0
    assert not child.is_running()


def test_a_check_loses_no_trace_and_no_worker_whatever_it_does(settings: Settings, tmp_path: Path) -> None:
    own = {"misbehave": "reject", "count_steps": "note"}
    checked = with_changed(settings, checks__own=own, scoring__threshold=0.0)
    variables = {"PYTHONPATH": install(tmp_path), "CONSTANTS": "ChecksSettings.timeout_s=0.5"}
    with at_work(checked, tmp_path, variables=variables) as (worker, client):
        failing = submitted(client, *(f"{misdeed} {TOKENS[0]}" for misdeed in ("exit", "loop", "raise")), "well done")
        failures = {misdeed: decision.checks[0].failure for misdeed, decision in failing.items()}
        assert failures == {"exit": "error", "loop": "timeout", "raise": "error", "well": None}
        assert [decision.outcome for decision in failing.values()] == ["review"] * 3 + ["rejected"]
        assert {(decision.checks[1].failure, decision.checks[1].kinds["step"]) for decision in failing.values()} == {(None, 2)}
        assert [event["check"] for event in worker.logged("check_failed", 3)] == ["misbehave"] * 3
        assert [text for text in (MARKER, TOKENS[0]) if text in worker.text()] == []
        # A redelivered trace keeps its decision, and is not checked again.
        counted = len(worker.events("check_failed"))
        (again,) = submitted(client, f"exit {TOKENS[0]}").values()
        assert (again, len(worker.events("check_failed"))) == (failing["exit"], counted)
    assert worker.process.returncode == 0


def test_a_worker_does_not_start_without_its_checks(settings: Settings, tmp_path: Path) -> None:
    checked = with_changed(settings, checks__own={"nobody": "note"})
    with start_worker(checked, tmp_path / "worker.log", ready=False, command=FAST_WORKER) as worker:
        assert worker.process.wait(PATIENCE_S) == 2
        (event,) = worker.events("worker_cannot_start")
        assert event["detail"].startswith("checks: ")
        assert "nobody" in event["detail"]


def test_compiled_rules_are_kept_in_our_cache_alone(tmp_path: Path) -> None:
    places = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = "import kp_scorer.checks.secrets"
    subprocess.run([sys.executable, "-c", code], env=os.environ | places, check=True, timeout=PATIENCE_S)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert [path.name for path in (tmp_path / "cache" / "kp-scorer").iterdir()] == ["secrets"]
