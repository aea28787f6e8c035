"""``kp-scorer`` as a user runs it: in a process of its own, judged by its streams and its exit code."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery
from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.settings import Settings

from tests.support.changed_settings import with_changed
from tests.support.commands import COMMAND, run, run_in_shell
from tests.support.processes import Worker, start_worker, wait_until
from tests.support.traces import fresh_samples, new_id

NOWHERE = "redis://127.0.0.1:1/0"


def rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def lines(*traces: object) -> str:
    return "".join(json.dumps(trace) + "\n" for trace in traces)


@pytest.fixture
def at_worker(shared_worker: Worker, shared_settings: Settings) -> dict[str, str]:
    """Variables that point a command to the running worker."""
    assert shared_worker.process.poll() is None
    return {"KP_BROKER_URL": shared_settings.broker.url}


def test_submit_wait_prints_the_decisions(at_worker: dict[str, str], tmp_path: Path) -> None:
    traces = fresh_samples(3)
    document = tmp_path / "traces.json"
    document.write_text(json.dumps(traces, indent=2))
    done = run("submit", str(document), "--wait", **at_worker)
    assert done.returncode == 0, done.stderr
    decided = {row["trace_id"]: row["decision"] for row in rows(done.stdout)}
    assert decided.keys() == {trace["id"] for trace in traces}
    assert all(decision["outcome"] in ("accepted", "rejected") for decision in decided.values())
    assert "no embedder" not in done.stderr


def test_submit_reports_invalid_lines_and_sends_the_rest(at_worker: dict[str, str]) -> None:
    good, bad = fresh_samples(2)
    bad["steps"][1]["type"] = "daydream"
    done = run("submit", "-", "--wait", stdin="{broken\n" + lines(bad, good), **at_worker)
    assert done.returncode == 1
    assert "line 1: $: expected JSON" in done.stderr
    assert "line 2: steps.1.type: " in done.stderr
    states = [row["state"] for row in rows(done.stdout)]
    assert sorted(states) == ["decided", "invalid", "invalid"]


def test_submit_stops_waiting_at_its_timeout(settings: Settings) -> None:
    # Nobody consumes this database's queue.
    (trace,) = fresh_samples(1)
    done = run("submit", "-", "--wait", "--timeout", "0.2", stdin=lines(trace), KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 1
    assert rows(done.stdout) == [{"trace_id": trace["id"], "state": "pending"}]
    assert "still pending" in done.stderr


def test_decisions_prints_each_decision_once(at_worker: dict[str, str]) -> None:
    traces = fresh_samples(4)
    run("submit", "-", "--wait", stdin=lines(*traces), **at_worker)
    wanted = {trace["id"] for trace in traces}
    printed: list[str] = []

    def all_printed() -> bool:
        first = run("decisions", "--limit", "1", **at_worker)
        assert first.returncode == 0
        assert len(rows(first.stdout)) <= 1
        second = run("decisions", **at_worker)
        printed.extend(row["trace_id"] for row in rows(first.stdout) + rows(second.stdout))
        return wanted <= set(printed)

    assert wait_until(all_printed)
    assert len(printed) == len(set(printed))


def test_decisions_follow_prints_new_decisions_until_ctrl_c(at_worker: dict[str, str]) -> None:
    run("decisions", **at_worker)
    (trace,) = fresh_samples(1)
    arguments = [*COMMAND, "decisions", "--follow"]
    with subprocess.Popen(arguments, env=os.environ | at_worker, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as follow:
        assert follow.stdout
        run("submit", "-", stdin=lines(trace), **at_worker)
        assert json.loads(follow.stdout.readline())["trace_id"] == trace["id"]
        follow.send_signal(signal.SIGINT)
        assert follow.wait(10) == 0
    assert rows(run("decisions", **at_worker).stdout) == []


def test_decisions_stay_on_the_queue_if_nobody_reads_the_output(at_worker: dict[str, str]) -> None:
    run("decisions", **at_worker)
    traces = fresh_samples(6)
    run("submit", "-", "--wait", stdin=lines(*traces), **at_worker)
    # Gone long before the first decision is printed.
    first = run_in_shell("decisions | true", **at_worker)
    assert "broker" not in first.stderr
    second = run("decisions", **at_worker)
    assert {row["trace_id"] for row in rows(second.stdout)} == {trace["id"] for trace in traces}


@pytest.mark.parametrize("command", [["submit", "-"], ["decisions"]])
def test_unreachable_broker_exits_3(command: list[str]) -> None:
    done = run(*command, stdin=lines(*fresh_samples(1)), KP_BROKER_URL=NOWHERE)
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_broker_the_error_names_kp_scorer_up() -> None:
    done = run("submit", "-", stdin=lines(*fresh_samples(1)))
    assert done.returncode == 2
    assert "kp-scorer up" in done.stderr


def test_status_exits_0_only_if_all_traces_are_decided(at_worker: dict[str, str]) -> None:
    (trace,) = fresh_samples(1)
    run("submit", "-", "--wait", stdin=lines(trace), **at_worker)
    done = run("status", trace["id"], **at_worker)
    (decided,) = rows(done.stdout)
    assert (done.returncode, decided["state"], decided["decision"]["trace_id"]) == (0, "decided", trace["id"])
    stranger = new_id()
    done = run("status", stranger, trace["id"], **at_worker)
    assert done.returncode == 1
    assert rows(done.stdout) == [{"trace_id": stranger, "state": "unknown"}, decided]


def test_stats_counts_submissions_and_messages(settings: Settings) -> None:
    # Nobody consumes this database's queue.
    run("submit", "-", stdin=lines(*fresh_samples(3)), KP_BROKER_URL=settings.broker.url)
    (stats,) = rows(run("stats", KP_BROKER_URL=settings.broker.url).stdout)
    waiting = stats.pop("waiting")
    books = {"submitted": 3, "pending": 3, "decided": 0, "dead": 0}
    assert stats == {**books, "oversized": 0, "dropped": {}, "full": [], "domains": {}, "unknown_domains": {}, "guards": {}}
    assert waiting == {settings.queues.traces: 3, settings.queues.accepted: 0, settings.queues.rejected: 0}


@pytest.mark.parametrize("command", ["dead-letter show", "dead-letter list", "dead-letter drop --yes", "forget", "status"])
def test_unknown_ids_exit_1(settings: Settings, command: str) -> None:
    done = CliRunner().invoke(commands, [*command.split(), "nope", "--broker-url", settings.broker.url])
    assert done.exit_code == 1
    assert "nope: there is no such dead letter" in done.stderr or "unknown" in done.output


def test_audit_agrees_and_exits_1_once_a_decision_is_altered(at_worker: dict[str, str]) -> None:
    (trace,) = fresh_samples(1)
    run("submit", "-", "--wait", stdin=lines(trace), **at_worker)
    done = run("audit", **at_worker)
    assert done.returncode == 0, done.stdout
    assert " 0 differ" in done.stderr
    assert "nothing was checked" not in done.stderr
    key = f"kp:trace:{trace['id']}"
    with redis.Redis.from_url(at_worker["KP_BROKER_URL"]) as store:
        stored: Any = store.hget(key, "decision")
        altered = json.loads(stored)
        altered["dimensions"]["novelty"] = 0.987
        store.hset(key, "decision", json.dumps(altered))
        done = run("audit", **at_worker)
        store.hset(key, "decision", stored)
    assert done.returncode == 1
    (difference,) = rows(done.stdout)
    assert (difference["trace_id"], difference["decided"]) == (trace["id"], 0.987)


def test_dead_letters_are_listed_shown_replayed_and_dropped(at_worker: dict[str, str]) -> None:
    bad, good = fresh_samples(2)
    app = Celery("foreign", broker=at_worker["KP_BROKER_URL"], set_as_current=False)
    app.send_task("score_trace", args=[bad | {"steps": []}], queue="traces")
    # Too large for the worker's limits and not for those of whoever replays it.
    long = good | {"task": {"objective": "word " * 40_000}}
    app.send_task("score_trace", args=[long], queue="traces")
    app.close()

    def listed(*arguments: str) -> list[dict[str, Any]]:
        return rows(run("dead-letter", "list", *arguments, **at_worker).stdout)

    (dead_letter,) = wait_until(lambda: listed("--trace-id", good["id"]))
    (invalid,) = wait_until(lambda: listed("--trace-id", bad["id"]))
    assert dead_letter["reason"] == "invalid"
    assert dead_letter["size_bytes"] > 200_000
    assert "payload" not in dead_letter
    (with_payload,) = rows(run("dead-letter", "show", dead_letter["letter_id"], **at_worker).stdout)
    assert with_payload["payload"] == long
    assert run("dead-letter", "replay", invalid["letter_id"], **at_worker).returncode == 1
    replay = ("dead-letter", "replay", dead_letter["letter_id"], "--set", "limits.field_chars=1000000")
    assert rows(run(*replay, **at_worker).stdout)[0]["state"] == "pending"
    # The worker's own limit still holds, so it dies again: the same submission, in the bytes of who submitted it last.
    (again,) = wait_until(lambda: listed("--trace-id", good["id"]))
    assert (again["reason"], again["detail"]) == (dead_letter["reason"], dead_letter["detail"])
    assert again["last_at"] > dead_letter["last_at"]
    for trace_id in (bad["id"], good["id"]):
        drop = ("dead-letter", "drop", "--trace-id", trace_id)
        assert run(*drop, stdin="n\n", **at_worker).returncode == 1
        assert rows(run(*drop, "--yes", **at_worker).stdout)[0]["state"] == "dropped"
        assert listed("--trace-id", trace_id) == []


def test_cache_is_shown_and_cleared_and_fills_again(at_worker: dict[str, str]) -> None:
    first, second = fresh_samples(2)
    run("submit", "-", "--wait", stdin=lines(first), **at_worker)
    (space,) = rows(run("cache", "info", **at_worker).stdout)
    assert space["model"] == "all-MiniLM-L6-v2"
    assert space["entries"] >= 1
    assert space["bytes"] > 1_536
    assert space["window"] == {"max_elements": 1_000, "ttl_s": 86_400, "slack_elements": 10_000, "against": "all"}
    assert 0 <= space["oldest_age_s"] < 600
    assert run("cache", "clear", "--yes", **at_worker).returncode == 0
    assert rows(run("cache", "info", **at_worker).stdout) == []
    (decided,) = rows(run("submit", "-", "--wait", stdin=lines(second), **at_worker).stdout)
    assert decided["decision"]["novelty"]["source"] == "empty_cache"
    (space,) = rows(run("cache", "info", **at_worker).stdout)
    assert space["entries"] == 1


def test_demo_without_an_embedder_notes_it_once(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(lines(*fresh_samples(3)))
    # Of a configured queue neither the demo nor its worker may know.
    secret = tmp_path / "url"
    secret.write_text("redis://127.0.0.1:1/0\n")
    done = run("demo", str(file), "--set", "embedding.embedder=none", KP_BROKER_URL_FILE=str(secret))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there is no embedder, so every novelty is 0.5") == 1


@pytest.mark.slow
def test_up_serves_other_commands_until_ctrl_c(tmp_path: Path) -> None:
    arguments = [*COMMAND, "up", "--workers", "2"]
    without_embedder = os.environ | {"KP_EMBEDDING_EMBEDDER": "none"}
    traces = fresh_samples(10)
    stderr_file = tmp_path / "stderr"
    with stderr_file.open("wb") as stderr, subprocess.Popen(arguments, env=without_embedder, stderr=stderr) as up:
        try:
            wait_until(lambda: run("decisions").returncode == 0)
            done = run("submit", "-", "--wait", "--timeout", "60", stdin=lines(*traces))
            assert done.returncode == 0, done.stderr
            assert {row["state"] for row in rows(done.stdout)} == {"decided"}
            for text in (done.stderr, stderr_file.read_text("utf-8")):
                assert text.count("there is no embedder, so every novelty is 0.5") == 1
            assert len(rows(run("decisions").stdout)) == 10
            children = psutil.Process(up.pid).children(recursive=True)
            assert len(children) >= 3
        finally:
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 0
    assert not any(child.is_running() for child in children)
    assert run("decisions").returncode == 2


def test_processes_of_up_end_when_it_is_killed() -> None:
    arguments = [*COMMAND, "up"]
    with subprocess.Popen(arguments, env=os.environ | {"KP_EMBEDDING_EMBEDDER": "none"}, stderr=subprocess.DEVNULL) as up:
        started = psutil.Process(up.pid)
        # A Redis and a worker.
        wait_until(lambda: len(started.children()) == 2)
        children = started.children(recursive=True)
        up.kill()
    wait_until(lambda: not any(child.is_running() for child in children), timeout_s=20)


def test_worker_exits_2_without_a_required_embedder(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tokenizers'] = None")
    required = {"KP_EMBEDDING_REQUIRED": "true", "KP_BROKER_URL": settings.broker.url, "PYTHONPATH": str(tmp_path)}
    done = run("worker", **required)
    assert done.returncode == 2
    assert "embedding.required" in done.stderr
    assert "kp-scorer[embedding]" in done.stderr


def test_missing_embedder_scores_with_unknown_novelty(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tokenizers'] = None")
    done = run("score", "-", stdin=lines(*fresh_samples(1)), PYTHONPATH=str(tmp_path))
    (decision,) = rows(done.stdout)
    assert decision["novelty"]["source"] == "no_embedder"
    assert decision["dimensions"]["novelty"] == 0.5


def test_worker_without_redis_exits_3(settings: Settings, tmp_path: Path) -> None:
    nowhere = with_changed(settings, redis__url=NOWHERE, worker__patience_s=0.5)
    with start_worker(nowhere, tmp_path / "log", ready=False) as worker:
        assert worker.process.wait(30) == 3
        assert worker.events("worker_cannot_start")
