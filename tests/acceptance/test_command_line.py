"""``kp-scorer`` as a user runs it: in a process of its own, judged by its streams and its exit code."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery
from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.settings import Settings

from tests.support.changed_settings import with_changed
from tests.support.commands import COMMAND, run, run_in_shell
from tests.support.processes import Worker, start_worker, wait_until
from tests.support.traces import fresh_samples, jsonl, rows_in

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def at_worker(shared_worker: Worker, shared_settings: Settings) -> dict[str, str]:
    """Variables that point a command to the running worker."""
    assert shared_worker.process.poll() is None
    return {"KP_BROKER_URL": shared_settings.broker.url}


def test_submit_reports_invalid_lines_and_sends_the_rest(at_worker: dict[str, str]) -> None:
    good, bad = fresh_samples(2)
    bad["steps"][1]["type"] = "daydream"
    done = run("submit", "-", "--wait", stdin="{broken\n" + jsonl(bad, good), **at_worker)
    assert done.returncode == 1
    assert "line 1: $: expected JSON" in done.stderr
    assert "line 2: steps.1.type: " in done.stderr
    *invalid, decided = sorted(rows_in(done.stdout), key=lambda row: str(row["state"]) != "invalid")
    assert [row["state"] for row in invalid] == ["invalid"] * 2
    assert decided["trace_id"] == good["id"]
    assert decided["decision"]["outcome"] in ("accepted", "rejected")
    assert "no embedder" not in done.stderr


def test_submit_stops_waiting_at_its_timeout(settings: Settings) -> None:
    # Nobody consumes this database's queue.
    (trace,) = fresh_samples(1)
    done = run("submit", "-", "--wait", "--timeout", "0.2", stdin=jsonl(trace), KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 1
    assert rows_in(done.stdout) == [{"trace_id": trace["id"], "state": "pending"}]
    assert "still pending" in done.stderr


def test_decisions_follow_prints_new_decisions_until_ctrl_c(at_worker: dict[str, str]) -> None:
    run("decisions", **at_worker)
    (trace,) = fresh_samples(1)
    arguments = [*COMMAND, "decisions", "--follow"]
    with subprocess.Popen(arguments, env=os.environ | at_worker, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as follow:
        assert follow.stdout
        run("submit", "-", stdin=jsonl(trace), **at_worker)
        assert json.loads(follow.stdout.readline())["trace_id"] == trace["id"]
        follow.send_signal(signal.SIGINT)
        assert follow.wait(10) == 0
    assert rows_in(run("decisions", **at_worker).stdout) == []


def test_decisions_are_printed_once_and_stay_on_the_queue_if_nobody_reads_the_output(at_worker: dict[str, str]) -> None:
    run("decisions", **at_worker)
    traces = fresh_samples(6)
    run("submit", "-", "--wait", stdin=jsonl(*traces), **at_worker)
    # Gone long before the first decision is printed.
    assert "broker" not in run_in_shell("decisions | true", **at_worker).stderr
    first, rest = run("decisions", "--limit", "1", **at_worker), run("decisions", **at_worker)
    assert [done.returncode for done in (first, rest)] == [0, 0]
    assert len(rows_in(first.stdout)) == 1
    printed = [row["trace_id"] for row in rows_in(first.stdout + rest.stdout)]
    assert sorted(printed) == sorted(trace["id"] for trace in traces)


@pytest.mark.parametrize(
    ("command", "variables", "code", "words"),
    [
        ("submit -", {"KP_BROKER_URL": NOWHERE}, 3, "127.0.0.1:1"),
        ("decisions", {"KP_BROKER_URL": NOWHERE}, 3, "127.0.0.1:1"),
        ("submit -", {}, 2, "kp-scorer up"),
    ],
)
def test_a_broker_that_is_missing_is_named(command: str, variables: dict[str, str], code: int, words: str) -> None:
    done = run(*command.split(), stdin=jsonl(*fresh_samples(1)), **variables)
    assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_stats_counts_submissions_and_messages(settings: Settings) -> None:
    # Nobody consumes this database's queue.
    run("submit", "-", stdin=jsonl(*fresh_samples(3)), KP_BROKER_URL=settings.broker.url)
    (stats,) = rows_in(run("stats", KP_BROKER_URL=settings.broker.url).stdout)
    waiting = stats.pop("waiting")
    books = {"submitted": 3, "pending": 3, "decided": 0, "dead": 0}
    assert stats == {**books, "oversized": 0, "dropped": {}, "full": [], "domains": {}, "unknown_domains": {}, "guards": {}}
    assert waiting == {settings.queues.traces: 3, settings.queues.accepted: 0, settings.queues.rejected: 0}


@pytest.mark.parametrize("command", ["dead-letter show", "dead-letter list", "dead-letter drop --yes", "forget", "status"])
def test_unknown_ids_exit_1(settings: Settings, command: str) -> None:
    done = CliRunner().invoke(commands, [*command.split(), "nope", "--broker-url", settings.broker.url])
    assert done.exit_code == 1
    assert "nope: there is no such dead letter" in done.stderr or "unknown" in done.output


def test_dead_letters_are_listed_shown_replayed_and_dropped(at_worker: dict[str, str]) -> None:
    bad, good = fresh_samples(2)
    app = Celery("foreign", broker=at_worker["KP_BROKER_URL"], set_as_current=False)
    app.send_task("score_trace", args=[bad | {"steps": []}], queue="traces")
    # Too large for the worker's limits and not for those of whoever replays it.
    long = good | {"task": {"objective": "word " * 40_000}}
    app.send_task("score_trace", args=[long], queue="traces")
    app.close()

    def listed(*arguments: str) -> list[dict[str, Any]]:
        return rows_in(run("dead-letter", "list", *arguments, **at_worker).stdout)

    (dead_letter,) = wait_until(lambda: listed("--trace-id", good["id"]))
    (invalid,) = wait_until(lambda: listed("--trace-id", bad["id"]))
    assert dead_letter["reason"] == "invalid"
    assert dead_letter["size_bytes"] > 200_000
    assert "payload" not in dead_letter
    (with_payload,) = rows_in(run("dead-letter", "show", dead_letter["letter_id"], **at_worker).stdout)
    assert with_payload["payload"] == long
    assert run("dead-letter", "replay", invalid["letter_id"], **at_worker).returncode == 1
    replay = ("dead-letter", "replay", dead_letter["letter_id"], "--set", "limits.field_chars=1000000")
    assert rows_in(run(*replay, **at_worker).stdout)[0]["state"] == "pending"
    # The worker's own limit still holds, so it dies again: the same submission, in the bytes of who submitted it last.
    (again,) = wait_until(lambda: listed("--trace-id", good["id"]))
    assert (again["reason"], again["detail"]) == (dead_letter["reason"], dead_letter["detail"])
    assert again["last_at"] > dead_letter["last_at"]
    for trace_id in (bad["id"], good["id"]):
        drop = ("dead-letter", "drop", "--trace-id", trace_id)
        assert run(*drop, stdin="n\n", **at_worker).returncode == 1
        assert rows_in(run(*drop, "--yes", **at_worker).stdout)[0]["state"] == "dropped"
        assert listed("--trace-id", trace_id) == []


def test_cache_is_shown_and_cleared_and_fills_again(at_worker: dict[str, str]) -> None:
    first, second = fresh_samples(2)
    run("submit", "-", "--wait", stdin=jsonl(first), **at_worker)
    (space,) = rows_in(run("cache", "info", **at_worker).stdout)
    assert space["model"] == "all-MiniLM-L6-v2"
    assert space["entries"] >= 1
    assert space["bytes"] > 1_536
    assert space["window"] == {"max_elements": 1_000, "ttl_s": 86_400, "slack_elements": 10_000, "against": "all"}
    assert 0 <= space["oldest_age_s"] < 600
    assert run("cache", "clear", "--yes", **at_worker).returncode == 0
    assert rows_in(run("cache", "info", **at_worker).stdout) == []
    (decided,) = rows_in(run("submit", "-", "--wait", stdin=jsonl(second), **at_worker).stdout)
    assert decided["decision"]["novelty"]["source"] == "empty_cache"
    (space,) = rows_in(run("cache", "info", **at_worker).stdout)
    assert space["entries"] == 1


@pytest.mark.parametrize("ends_by", [signal.SIGINT, signal.SIGKILL])
def test_up_serves_other_commands_and_leaves_no_process_behind(ends_by: signal.Signals, tmp_path: Path) -> None:
    arguments = [*COMMAND, "up"]
    without_embedder = os.environ | {"KP_EMBEDDING_EMBEDDER": "none"}
    stderr_file = tmp_path / "stderr"
    with stderr_file.open("wb") as stderr, subprocess.Popen(arguments, env=without_embedder, stderr=stderr) as up:
        try:
            wait_until(lambda: run("decisions").returncode == 0)
            done = run("submit", "-", "--wait", "--timeout", "60", stdin=jsonl(*fresh_samples(3)))
            assert {row["state"] for row in rows_in(done.stdout)} == {"decided"}
            for text in (done.stderr, stderr_file.read_text("utf-8")):
                assert text.count("there is no embedder, so every novelty is 0.5") == 1
            assert len(rows_in(run("decisions").stdout)) == 3
            started = psutil.Process(up.pid)
            # A Redis and a worker.
            assert len(started.children()) == 2
            children = started.children(recursive=True)
            up.send_signal(ends_by)
            assert up.wait(60) == (0 if ends_by == signal.SIGINT else -9)
        finally:
            up.kill()
    wait_until(lambda: not any(child.is_running() for child in children), timeout_s=20)
    assert run("decisions").returncode == 2


def test_an_embedder_that_cannot_be_loaded_is_needed_only_where_it_is_required(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tokenizers'] = None")
    done = run("worker", KP_EMBEDDING_REQUIRED="true", KP_BROKER_URL=settings.broker.url, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "embedding.required" in done.stderr
    assert "kp-scorer[embedding]" in done.stderr
    (decision,) = rows_in(run("score", "-", stdin=jsonl(*fresh_samples(1)), PYTHONPATH=str(tmp_path)).stdout)
    assert (decision["novelty"]["source"], decision["dimensions"]["novelty"]) == ("no_embedder", 0.5)


def test_worker_without_redis_exits_3(settings: Settings, tmp_path: Path) -> None:
    nowhere = with_changed(settings, redis__url=NOWHERE, worker__patience_s=0.5)
    with start_worker(nowhere, tmp_path / "log", ready=False) as worker:
        assert worker.process.wait(30) == 3
        assert worker.events("worker_cannot_start")
