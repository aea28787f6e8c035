"""``kp-scorer`` as a user runs it: in a process of its own, judged by its streams and its exit code."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis
from kp_scorer.local.embedded_redis import running
from kp_scorer.settings import Settings

from tests.support.changed_settings import settings_at, with_changed
from tests.support.commands import COMMAND, command, run, run_in_shell
from tests.support.processes import FAST_WORKER, KP_SCORER_WORKER, PATIENCE_S, opened, start_worker, wait_until
from tests.support.traces import fresh_samples, jsonl, rows_in

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture(scope="module")
def at_worker(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that point a command to a running worker; its database is never emptied, so tests use ids of their own."""
    url = redis_url.removesuffix("/0") + "/4"
    with start_worker(settings_at(url), tmp_path_factory.mktemp("shared") / "worker.log", command=FAST_WORKER):
        yield {"KP_BROKER_URL": url}


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
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with opened(*COMMAND, "decisions", "--follow", env=os.environ | at_worker, **streams) as follow:
        assert follow.stdout
        run("submit", "-", stdin=jsonl(trace), **at_worker)
        assert json.loads(follow.stdout.readline())["trace_id"] == trace["id"]
        follow.send_signal(signal.SIGINT)
        assert follow.wait(PATIENCE_S) == 0
    assert rows_in(run("decisions", **at_worker).stdout) == []


def test_decisions_are_printed_once_and_stay_queued_if_nobody_reads_the_output(at_worker: dict[str, str]) -> None:
    run("decisions", **at_worker)
    traces = fresh_samples(6)
    run("submit", "-", "--wait", stdin=jsonl(*traces), **at_worker)
    # `true` exits long before the first decision is printed.
    assert "broker" not in run_in_shell("kp-scorer decisions | true", **at_worker).stderr
    first, rest = run("decisions", "--limit", "1", **at_worker), run("decisions", **at_worker)
    assert [done.returncode for done in (first, rest)] == [0, 0]
    assert len(rows_in(first.stdout)) == 1
    printed = [row["trace_id"] for row in rows_in(first.stdout + rest.stdout)]
    assert sorted(printed) == sorted(trace["id"] for trace in traces)


@pytest.mark.parametrize(
    ("asked", "variables", "code", "words"),
    [
        ("submit -", {"KP_BROKER_URL": NOWHERE}, 3, "127.0.0.1:1"),
        ("decisions", {"KP_BROKER_URL": NOWHERE}, 3, "127.0.0.1:1"),
        ("submit -", {}, 2, "kp-scorer up"),
    ],
)
def test_a_broker_that_is_missing_is_named(asked: str, variables: dict[str, str], code: int, words: str) -> None:
    done = run(*asked.split(), stdin=jsonl(*fresh_samples(1)), **variables)
    assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr


def test_stats_counts_submissions_and_messages(settings: Settings, redis_client: redis.Redis) -> None:
    redis_client.rpush("traces.oversized", b"a", b"b")
    # Nobody consumes this database's queue.
    run("submit", "-", stdin=jsonl(*fresh_samples(3)), KP_BROKER_URL=settings.broker.url)
    (stats,) = rows_in(run("stats", KP_BROKER_URL=settings.broker.url).stdout)
    waiting, parts = stats.pop("waiting"), stats.pop("bytes")["redis"]
    assert min(parts["records"], parts["queues"]) > 3_000
    books = {"submitted": 3, "pending": 3, "decided": 0, "dead": 0}
    empty: dict[str, object] = {
        "dropped": {},
        "full": [],
        "domains": {},
        "unknown_domains": {},
        "guards": {},
        "revised": {},
        "workers": [],
    }
    assert stats == {**books, **empty, "oversized": 2}
    results = (settings.queues.name("accepted"), settings.queues.name("rejected"), settings.queues.name("revised"))
    assert waiting == {settings.queues.first: 3, **dict.fromkeys(results, 0)}


@pytest.mark.parametrize("asked", ["show", "list", "drop --yes"])
def test_an_unknown_dead_letter_exits_1(settings: Settings, asked: str) -> None:
    done = command(settings, "dead-letter", *asked.split(), "nope")
    assert done.exit_code == 1
    assert "nope: there is no such dead letter" in done.stderr


def test_cache_is_shown_and_cleared_and_fills_again(at_worker: dict[str, str]) -> None:
    first, second = fresh_samples(2)
    run("submit", "-", "--wait", stdin=jsonl(first), **at_worker)
    (space,) = rows_in(run("cache", "info", **at_worker).stdout)
    assert space["model"] == "word-hash"
    assert space["entries"] >= 1
    assert space["bytes"] > 512
    assert space["window"] == {"max_elements": 1_000, "ttl_s": 86_400, "slack_elements": 10_000, "against": "all"}
    assert 0 <= space["oldest_age_s"] < 600
    assert run("cache", "clear", "--yes", **at_worker).returncode == 0
    assert rows_in(run("cache", "info", **at_worker).stdout) == []
    (decided,) = rows_in(run("submit", "-", "--wait", stdin=jsonl(second), **at_worker).stdout)
    assert decided["decision"]["novelty"]["source"] == "empty_cache"
    (space,) = rows_in(run("cache", "info", **at_worker).stdout)
    assert space["entries"] == 1


def test_up_serves_other_commands_and_leaves_no_process_behind_even_if_it_is_killed(tmp_path: Path) -> None:
    without_embedder = os.environ | {"KP_EMBEDDING_EMBEDDER": "none"}
    stderr_file = tmp_path / "stderr"
    with stderr_file.open("wb") as stderr, opened(*COMMAND, "up", env=without_embedder, stderr=stderr) as up:
        try:
            wait_until(running)
            done = run("submit", "-", "--wait", "--timeout", "60", stdin=jsonl(*fresh_samples(3)))
            assert {row["state"] for row in rows_in(done.stdout)} == {"decided"}
            for text in (done.stderr, stderr_file.read_text("utf-8")):
                assert text.count("there is no embedder, so every novelty is 0.5") == 1
            assert len(rows_in(run("decisions").stdout)) == 3
            started = psutil.Process(up.pid)
            # The children are a Redis and a worker.
            assert len(started.children()) == 2
            children = started.children(recursive=True)
        finally:
            up.kill()
    wait_until(lambda: not any(child.is_running() for child in children))
    assert run("decisions").returncode == 2


def test_an_embedder_that_cannot_be_loaded_is_needed_only_where_it_is_named(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tokenizers'] = None")
    done = run("worker", KP_EMBEDDING_EMBEDDER="openvino", KP_BROKER_URL=settings.broker.url, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert "embedding.embedder: openvino cannot be used" in done.stderr
    assert "kp-scorer[embedding]" in done.stderr
    (decision,) = rows_in(run("score", "-", stdin=jsonl(*fresh_samples(1)), PYTHONPATH=str(tmp_path)).stdout)
    assert (decision["novelty"]["source"], decision["dimensions"]["novelty"]) == ("no_embedder", 0.5)


def test_worker_without_redis_exits_3(settings: Settings, tmp_path: Path) -> None:
    nowhere = with_changed(settings, redis__url=NOWHERE)
    command, variables = ("tests.support.constants", *KP_SCORER_WORKER), {"CONSTANTS": "WorkerSettings.patience_s=0.5"}
    with start_worker(nowhere, tmp_path / "log", ready=False, command=command, variables=variables) as worker:
        assert worker.process.wait(PATIENCE_S) == 3
        assert worker.events("worker_cannot_start")
