"""``kp-scorer`` as a user runs it: in a process of its own, judged by its streams and its exit code."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from celery import Celery
from click.testing import CliRunner
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.main import commands
from kp_scorer.decider import Decider
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings, as_environment
from kp_scorer.store import Store

from tests.support.builders import make_trace
from tests.support.commands import COMMAND, run, run_in_shell
from tests.support.paths import REPOSITORY
from tests.support.processes import Worker, start_worker, wait_until
from tests.support.traces import fresh_samples, new_id

NOWHERE = "redis://127.0.0.1:1/0"
COMMANDS = ["demo", "up", "worker", "submit", "decisions", "status", "stats", "score", "audit", "forget", "schema", "reference"]
COMMANDS += ["explain", "completion"]
COMMANDS += [
    "cache info",
    "cache warm",
    "cache clear",
    "dead-letter list",
    "dead-letter show",
    "dead-letter replay",
    "dead-letter drop",
]
COMMANDS += ["calibrate", "capacity", "convert", "doctor", "health live", "health ready", "re-decide", "report", "top"]


def rows(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


def lines(*traces: object) -> str:
    return "".join(json.dumps(trace) + "\n" for trace in traces)


@pytest.fixture
def at_worker(shared_worker: Worker, shared_settings: Settings) -> dict[str, str]:
    """Variables that point a command to the running worker."""
    assert shared_worker.process.poll() is None
    return {"KP_BROKER_URL": shared_settings.broker.url}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str) -> None:
    assert "Example: " in run(*command.split(), "--help").stdout


def test_submit_prints_one_line_a_trace_at_once(at_worker: dict[str, str]) -> None:
    traces = fresh_samples(3)
    done = run("submit", "-", stdin=lines(*traces), **at_worker)
    assert done.returncode == 0, done.stderr
    assert rows(done.stdout) == [{"trace_id": trace["id"], "state": "pending"} for trace in traces]


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


def test_submit_names_invalid_lines_and_sends_the_rest(at_worker: dict[str, str]) -> None:
    good, bad = fresh_samples(2)
    bad["steps"][1]["type"] = "daydream"
    done = run("submit", "-", "--wait", stdin="{broken\n" + lines(bad, good), **at_worker)
    assert done.returncode == 1
    assert "line 1: $: expected JSON" in done.stderr
    assert "line 2: steps.1.type: " in done.stderr
    states = [row["state"] for row in rows(done.stdout)]
    assert sorted(states) == ["decided", "invalid", "invalid"]


def test_submit_stops_waiting_in_time(settings: Settings) -> None:
    # Nobody consumes this database's queue.
    (trace,) = fresh_samples(1)
    done = run("submit", "-", "--wait", "--timeout", "0.2", stdin=lines(trace), KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 1
    assert rows(done.stdout) == [{"trace_id": trace["id"], "state": "pending"}]
    assert "still pending" in done.stderr


def test_decisions_takes_each_decision_once(at_worker: dict[str, str]) -> None:
    traces = fresh_samples(4)
    run("submit", "-", "--wait", stdin=lines(*traces), **at_worker)
    wanted = {trace["id"] for trace in traces}
    taken: list[str] = []

    def all_taken() -> bool:
        one = run("decisions", "--limit", "1", **at_worker)
        assert one.returncode == 0
        assert len(rows(one.stdout)) <= 1
        rest = run("decisions", **at_worker)
        taken.extend(row["trace_id"] for row in rows(one.stdout) + rows(rest.stdout))
        return wanted <= set(taken)

    assert wait_until(all_taken)
    assert len(taken) == len(set(taken))


def test_decisions_follow_prints_what_comes_in_until_ctrl_c(at_worker: dict[str, str]) -> None:
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


def test_decisions_that_nobody_reads_stay_on_the_queue(at_worker: dict[str, str]) -> None:
    run("decisions", **at_worker)
    traces = fresh_samples(6)
    run("submit", "-", "--wait", stdin=lines(*traces), **at_worker)
    # Gone long before the first decision is printed.
    first = run_in_shell("decisions | true", **at_worker)
    assert "broker" not in first.stderr
    rest = run("decisions", **at_worker)
    assert {row["trace_id"] for row in rows(rest.stdout)} == {trace["id"] for trace in traces}


def test_a_trace_over_the_limits_is_named_with_its_size(at_worker: dict[str, str]) -> None:
    huge, good = fresh_samples(2)
    huge["task"]["objective"] = "x" * 10_000_000
    done = run("submit", "-", stdin=lines(huge, good), **at_worker)
    assert done.returncode == 1
    assert "line 1: $: expected at most 1048576 bytes, got 10" in done.stderr
    assert len(rows(done.stdout)) == 2


def test_a_missing_file_is_named() -> None:
    done = run("score", "no-such-file.jsonl")
    assert done.returncode == 2
    assert "no-such-file.jsonl" in done.stderr


def test_an_empty_file_is_said_to_be_empty(at_worker: dict[str, str]) -> None:
    for command in ("submit", "score"):
        done = run(command, "-", **at_worker)
        assert (done.returncode, done.stdout) == (0, "")
        assert "no traces in -" in done.stderr


@pytest.mark.parametrize("command", [["submit", "-"], ["decisions"]])
def test_a_missing_broker_is_named_and_exits_3(command: list[str]) -> None:
    done = run(*command, stdin=lines(*fresh_samples(1)), KP_BROKER_URL=NOWHERE)
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_configured_and_nothing_running_is_said_with_the_remedy() -> None:
    done = run("submit", "-", stdin=lines(*fresh_samples(1)))
    assert done.returncode == 2
    assert "kp-scorer up" in done.stderr


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"KP_NOVELTY_MAX_ELEMENTS": "0"}, "novelty.max_elements"),
        ({"KP_EMBEDDING_EMBEDDER": "maybe"}, "embedding.embedder"),
        ({"KP_NO_SUCH": "1"}, "KP_NO_SUCH"),
        ({"KP_CONFIG": "/does/not/exist"}, "config"),
        ({"KP_BROKER_URL": "gopher://x"}, "broker.url"),
    ],
)
def test_a_wrong_setting_is_named_and_exits_2(variables: dict[str, str], named: str) -> None:
    done = run("score", "-", **variables)
    assert done.returncode == 2
    assert named in done.stderr


def test_score_prints_decisions_in_input_order() -> None:
    traces = fresh_samples(20)
    done = run("score", "-", "--embedder", "none", stdin=lines(*traces))
    assert done.returncode == 0
    decisions = rows(done.stdout)
    assert [decision["trace_id"] for decision in decisions] == [trace["id"] for trace in traces]
    assert {decision["novelty"]["source"] for decision in decisions} == {"no_embedder"}
    assert done.stderr.count("there is no embedder, so every novelty is 0.5") == 1


def test_status_tells_what_became_of_each_trace_and_exits_0_only_if_all_are_decided(at_worker: dict[str, str]) -> None:
    (trace,) = fresh_samples(1)
    run("submit", "-", "--wait", stdin=lines(trace), **at_worker)
    done = run("status", trace["id"], **at_worker)
    (decided,) = rows(done.stdout)
    assert (done.returncode, decided["state"], decided["decision"]["trace_id"]) == (0, "decided", trace["id"])
    stranger = new_id()
    done = run("status", stranger, trace["id"], **at_worker)
    assert done.returncode == 1
    assert rows(done.stdout) == [{"trace_id": stranger, "state": "unknown"}, decided]


def test_stats_shows_books_that_balance_and_what_the_queues_hold(settings: Settings) -> None:
    # Nobody consumes this database's queue.
    run("submit", "-", stdin=lines(*fresh_samples(3)), KP_BROKER_URL=settings.broker.url)
    (found,) = rows(run("stats", KP_BROKER_URL=settings.broker.url).stdout)
    waiting = found.pop("waiting")
    books = {"submitted": 3, "pending": 3, "decided": 0, "dead": 0}
    assert found == {**books, "oversized": 0, "dropped": {}, "full": [], "domains": {}, "unknown_domains": {}}
    assert waiting == {settings.queues.traces: 3, settings.queues.accepted: 0, settings.queues.rejected: 0}


@pytest.mark.parametrize("broken", ["closed", "full"])
def test_submit_goes_on_when_stdout_cannot_be_written(settings: Settings, broken: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    # Nobody consumes this database's queue.
    with open(writing, "wb") if broken == "closed" else Path("/dev/full").open("wb") as stdout:  # noqa: PTH123 - a descriptor
        done = subprocess.run(
            [*COMMAND, "submit", "-"],
            input="{broken\n" + lines(*fresh_samples(5)),
            env=os.environ | {"KP_BROKER_URL": settings.broker.url},
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2
    reason = "Broken pipe" if broken == "closed" else "No space left on device"
    assert done.stderr.splitlines()[-1] == f"kp-scorer: stdout: {reason}; submitted 5 of 6 all the same"
    with Store.open(settings) as store:
        assert store.ledger.counts().pending == 5


@pytest.mark.parametrize("command", [["score", "-", "--embedder", "none"], ["schema", "trace"]])
def test_a_full_disk_behind_stdout_is_named(command: list[str]) -> None:
    with Path("/dev/full").open("wb") as stdout:
        done = subprocess.run(
            [*COMMAND, *command],
            input=lines(*fresh_samples(2)),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "kp-scorer: stdout: No space left on device")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["dead-letter show", "dead-letter list", "dead-letter drop --yes", "forget", "status"])
def test_what_is_unknown_is_said_to_be_so(settings: Settings, command: str) -> None:
    done = CliRunner().invoke(commands, [*command.split(), "nope", "--broker-url", settings.broker.url])
    assert done.exit_code == 1
    assert "nope: there is no such dead letter" in done.stderr or "unknown" in done.output


@pytest.mark.parametrize("command", [["demo"], ["up"], ["score", "-"]])
def test_urls_are_no_options_of_what_does_not_use_them(command: list[str]) -> None:
    done = CliRunner().invoke(commands, [*command, "--broker-url", NOWHERE])
    assert done.exit_code == 2
    assert "No such option '--broker-url'" in done.stderr


@pytest.mark.parametrize("file", ["config/kp-scorer.toml", "deploy/redis.conf"])
def test_reference_prints_the_configuration_that_the_repository_has(file: str) -> None:
    assert run("reference", Path(file).name).stdout == (REPOSITORY / file).read_text("utf-8")


@pytest.mark.parametrize("message", ["trace", "decision"])
def test_schema_prints_a_json_schema(message: str) -> None:
    printed = json.loads(run("schema", message).stdout)
    assert printed["type"] == "object"
    assert ("@context" if message == "trace" else "schema_version") in printed["properties"]


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


def test_audit_says_that_it_checked_nothing_where_there_is_no_log(settings: Settings) -> None:
    done = run("audit", **as_environment(settings))
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing was checked: there is no novelty log" in done.stderr


def test_audit_says_how_many_decisions_it_cannot_check(settings: Settings, store: Store) -> None:
    traces = [make_trace(trace_id=f"kp:trace:{number}") for number in "ab"]
    Decider(store.ledger, Policy(), None, max_attempts=5).decide(traces)
    done = run("audit", **as_environment(settings))
    assert done.returncode == 0
    assert "2 decisions were made without an embedder: they have no entry in any log" in done.stderr


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

    (letter,) = wait_until(lambda: listed("--trace-id", good["id"]))
    (other,) = wait_until(lambda: listed("--trace-id", bad["id"]))
    assert letter["reason"] == "invalid"
    assert letter["size_bytes"] > 200_000
    assert "payload" not in letter
    (shown,) = rows(run("dead-letter", "show", letter["letter_id"], **at_worker).stdout)
    assert shown["payload"] == long
    assert run("dead-letter", "replay", other["letter_id"], **at_worker).returncode == 1
    replay = ("dead-letter", "replay", letter["letter_id"], "--set", "limits.field_chars=1000000")
    assert rows(run(*replay, "--dry-run", **at_worker).stdout)[0]["state"] == "would be replayed"
    assert rows(run(*replay, **at_worker).stdout)[0]["state"] == "pending"
    # The worker's own limit still holds, so it dies again: the same submission, in the bytes of who submitted it last.
    (again,) = wait_until(lambda: listed("--trace-id", good["id"]))
    assert (again["reason"], again["detail"]) == (letter["reason"], letter["detail"])
    assert again["last_at"] > letter["last_at"]
    for trace_id in (bad["id"], good["id"]):
        drop = ("dead-letter", "drop", "--trace-id", trace_id)
        assert run(*drop, stdin="n\n", **at_worker).returncode == 1
        assert rows(run(*drop, "--dry-run", **at_worker).stdout)[0]["state"] == "would be dropped"
        assert rows(run(*drop, "--yes", **at_worker).stdout)[0]["state"] == "dropped"
        assert listed("--trace-id", trace_id) == []


def test_forget_erases_vector_record_and_dead_letters(at_worker: dict[str, str]) -> None:
    (trace,) = fresh_samples(1)
    run("submit", "-", "--wait", stdin=lines(trace), **at_worker)
    (erased,) = rows(run("forget", trace["id"], **at_worker).stdout)
    assert erased == {"trace_id": trace["id"], "vectors": 1, "records": 1, "dead_letters": 0}
    forgotten = run("forget", trace["id"], **at_worker)
    assert forgotten.returncode == 1
    (again,) = rows(forgotten.stdout)
    assert again == {"trace_id": trace["id"], "vectors": 0, "records": 0, "dead_letters": 0}


def test_cache_is_shown_and_emptied_and_fills_again(at_worker: dict[str, str]) -> None:
    one, other = fresh_samples(2)
    run("submit", "-", "--wait", stdin=lines(one), **at_worker)
    (shown,) = rows(run("cache", "info", **at_worker).stdout)
    assert shown["model"] == "all-MiniLM-L6-v2"
    assert shown["entries"] >= 1
    assert shown["bytes"] > 1_536
    assert shown["window"] == {"max_elements": 1_000, "ttl_s": 86_400, "slack_elements": 10_000, "slack_s": 3_600}
    assert 0 <= shown["oldest_age_s"] < 600
    assert run("cache", "clear", "--yes", **at_worker).returncode == 0
    assert rows(run("cache", "info", **at_worker).stdout) == []
    (decided,) = rows(run("submit", "-", "--wait", stdin=lines(other), **at_worker).stdout)
    assert decided["decision"]["novelty"]["source"] == "empty_cache"
    informed = run("cache", "info", **at_worker)
    (shown,) = rows(informed.stdout)
    domain = other["metadata"]["task_domain"]
    assert shown["domains"] == {domain: 1.0}
    assert f"100% of the newest decided entries are of the domain {domain}" in informed.stderr


@pytest.mark.slow
def test_demo_shows_decisions_and_leaves_nothing_behind() -> None:
    mark = new_id()
    done = run("demo", stdin="", MARK=mark)
    assert done.returncode == 0, done.stderr
    assert "48 traces: 21 accepted, 27 rejected" in done.stderr
    assert "first decision after" in done.stderr
    # Children inherit the variable, so it finds them wherever they went.
    assert [process for process in psutil.process_iter(["environ"]) if mark in str(process.info["environ"])] == []


def test_demo_without_an_embedder_says_so_once(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl"
    file.write_text(lines(*fresh_samples(3)))
    # Of a configured queue neither the demo nor its worker may know.
    secret = tmp_path / "url"
    secret.write_text("redis://127.0.0.1:1/0\n")
    done = run("demo", str(file), "--set", "embedding.embedder=none", KP_BROKER_URL_FILE=str(secret))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("there is no embedder, so every novelty is 0.5") == 1


@pytest.mark.slow
def test_up_serves_the_other_commands_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    arguments = [*COMMAND, "up", "--workers", "2", "--data-dir", str(tmp_path / "data")]
    without_embedder = os.environ | {"KP_EMBEDDING_EMBEDDER": "none"}
    traces = fresh_samples(10)
    said = tmp_path / "stderr"
    with said.open("wb") as stderr, subprocess.Popen(arguments, env=without_embedder, stderr=stderr) as up:
        try:
            wait_until(lambda: run("decisions").returncode == 0)
            done = run("submit", "-", "--wait", "--timeout", "60", stdin=lines(*traces))
            assert done.returncode == 0, done.stderr
            assert {row["state"] for row in rows(done.stdout)} == {"decided"}
            for text in (done.stderr, said.read_text("utf-8")):
                assert text.count("there is no embedder, so every novelty is 0.5") == 1
            assert len(rows(run("decisions").stdout)) == 10
            children = psutil.Process(up.pid).children(recursive=True)
            assert len(children) >= 3
        finally:
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 0
    assert not any(child.is_running() for child in children)
    assert run("decisions").returncode == 2


def test_what_up_has_started_ends_with_it_even_if_it_is_killed(tmp_path: Path) -> None:
    arguments = [*COMMAND, "up", "--data-dir", str(tmp_path / "data")]
    with subprocess.Popen(arguments, env=os.environ | {"KP_EMBEDDING_EMBEDDER": "none"}, stderr=subprocess.DEVNULL) as up:
        started = psutil.Process(up.pid)
        # A Redis and a worker.
        wait_until(lambda: len(started.children()) == 2)
        children = started.children(recursive=True)
        up.kill()
    wait_until(lambda: not any(child.is_running() for child in children), timeout_s=20)


def _celery(settings: Settings) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "kp_scorer.app", "worker"],
        env=os.environ | as_environment(settings) | {"KP_EMBEDDING_EMBEDDER": "none", "KP_LOG_FORMAT": "json"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.terminate()
        assert process.wait(30) == 0
        assert process.stdout
        assert process.stdout.read() == ""


def test_celerys_own_command_runs_the_worker(settings: Settings) -> None:
    for process in _celery(settings):
        assert process.stderr
        assert any("every trace gets this novelty" in line for line in process.stderr), "it has no embedder"
        assert any("worker_ready" in line and '"embedder": "none"' in line for line in process.stderr)
        with make_celery(settings) as app:
            # Others on this machine have names of their own.
            assert [name.partition("@")[0] for (name,) in app.control.ping(limit=1)] == [f"scorer-{process.pid}"]
        (trace,) = fresh_samples(1)
        done = run("submit", "-", "--wait", "--timeout", "30", stdin=lines(trace), KP_BROKER_URL=settings.broker.url)
        assert rows(done.stdout)[0]["decision"]["novelty"]["source"] == "no_embedder"


def test_a_required_embedder_that_is_missing_stops_the_worker_at_start(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tokenizers'] = None")
    required = {"KP_EMBEDDING_REQUIRED": "true", "KP_BROKER_URL": settings.broker.url, "PYTHONPATH": str(tmp_path)}
    done = run("worker", **required)
    assert done.returncode == 2
    assert "embedding.required" in done.stderr
    assert "kp-scorer[embedding]" in done.stderr


def test_a_missing_embedder_that_is_not_required_scores_with_unknown_novelty(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tokenizers'] = None")
    done = run("score", "-", stdin=lines(*fresh_samples(1)), PYTHONPATH=str(tmp_path))
    (decision,) = rows(done.stdout)
    assert decision["novelty"]["source"] == "no_embedder"
    assert decision["dimensions"]["novelty"] == 0.5


def test_a_worker_without_redis_gives_up_and_says_why(settings: Settings, tmp_path: Path) -> None:
    nowhere = settings.model_copy(
        update={
            "redis": settings.redis.model_copy(update={"url": NOWHERE}),
            "worker": settings.worker.model_copy(update={"patience_s": 0.5}),
        }
    )
    with start_worker(nowhere, tmp_path / "log", ready=False) as worker:
        assert worker.process.wait(30) == 3
        assert worker.events("worker_cannot_start")
