"""`up`, and the output of other commands beside it, both at a terminal and through a pipe."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kp_scorer.cli.main import commands
from kp_scorer.local.embedded_redis import running

from tests.support.commands import COMMAND, invoked, jsonl_file, run, run_at_terminal
from tests.support.processes import PATIENCE_S, free_port, opened, wait_until
from tests.support.traces import fresh_samples, rows_in


@contextmanager
def up(folder: Path, *options: str) -> Iterator[Path]:
    """Run `kp-scorer up` and yield the file with its output; at the end, stop it with `down`."""
    log = folder / "up.log"
    ports = f"metrics.port={free_port()}"
    command = [*COMMAND, "up", "--set", "embedding.embedder=none", "--set", ports, *options]
    with log.open("wb") as stderr, opened(*command, stderr=stderr) as process:
        wait_until(lambda: running() or process.poll() is not None)
        yield log
        assert run("down").returncode == 0
        assert process.wait(PATIENCE_S) == 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return jsonl_file(tmp_path / "traces.jsonl", *fresh_samples(3))


def test_up_names_what_it_keeps_and_other_commands_use_its_settings(tmp_path: Path, file: Path) -> None:
    thresholds = tmp_path / "thresholds.toml"
    thresholds.write_text("[scoring]\nthreshold = 0.99\n")
    state = Path(os.environ["XDG_STATE_HOME"]) / "kp-scorer"
    with up(tmp_path) as log:
        wait_until(lambda: "there is no decision yet" in log.read_text())
        assert str(state / "data") in log.read_text()
        first = run("submit", str(file), "--wait")
        assert {row["decision"]["threshold"] for row in rows_in(first.stdout)} == {0.75}
        assert "decided before" not in first.stderr
    with up(tmp_path, "--config", str(thresholds)) as log:
        wait_until(lambda: "has 3 decisions from earlier: they stand" in log.read_text())
        again = run("submit", str(file))
        assert "3 of them were decided before" in again.stderr
        assert [row["state"] for row in rows_in(again.stdout)] == ["decided"] * 3
        # Settings that the file does not name are those of the other terminal's `up`.
        weights = tmp_path / "weights.toml"
        weights.write_text("[scoring]\ncap_step_term = true\n")
        flips = run("re-decide", "--stored", "--thresholds", str(weights))
        assert {row["threshold_after"] for row in rows_in(flips.stdout)} <= {0.99}
        assert "3 of 3 decisions flip" in flips.stderr
        assert run("re-decide", "--stored", "--thresholds", str(weights), KP_SCORING_THRESHOLD="0.75").stdout == ""
    with up(tmp_path, "--fresh", "--config", str(thresholds)) as log:
        wait_until(lambda: "there is no decision yet" in log.read_text())
        fresh = run("submit", str(file), "--wait")
        assert {row["decision"]["threshold"] for row in rows_in(fresh.stdout)} == {0.99}
    assert "kp-scorer down --remove" in run("down").stderr
    assert run("down", "--remove", stdin="n\n").returncode == 1
    assert state.exists()
    assert f"removed {state}" in run("down", "--remove", "--yes", XDG_CACHE_HOME=str(tmp_path / "cache")).stderr
    assert not state.exists()


def test_down_removes_data_that_up_kept_behind_a_link(tmp_path: Path) -> None:
    state = Path(os.environ["XDG_STATE_HOME"]) / "kp-scorer"
    (disk := tmp_path / "disk").mkdir(mode=0o700)
    state.mkdir(parents=True)
    (state / "data").symlink_to(disk)
    with up(tmp_path):
        pass
    with up(tmp_path, "--fresh"):
        assert (disk / "redis.log").exists()
    assert run("down", "--remove", "--yes", XDG_CACHE_HOME=str(tmp_path / "cache")).returncode == 0
    assert not state.exists()
    assert [path.name for path in disk.iterdir()] == ["lock"]


STOPPED_WHILE_IT_FORKS = """
import os, signal
from kp_scorer.cli.main import main

def stop():
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL and not sent:
        sent.append(signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)

sent = []
os.register_at_fork(after_in_parent=stop)
main()
"""


def test_up_stops_by_a_signal_that_comes_while_it_forks() -> None:
    ports = f"metrics.port={free_port()}"
    command = [sys.executable, "-c", STOPPED_WHILE_IT_FORKS, "up", "--set", "embedding.embedder=none", "--set", ports]
    with opened(*command, stderr=subprocess.PIPE) as process:
        _, output = process.communicate(timeout=PATIENCE_S)
    assert b"stopping: workers finish" in output
    assert process.returncode == 0
    assert running() is None


def test_a_terminal_gets_text_and_a_pipe_json_lines_also_on_the_first_day(tmp_path: Path, file: Path) -> None:
    with up(tmp_path, "--workers", "2"):
        wait_until(lambda: invoked(commands, "health", "--ready").exit_code == 0)
        # `health` asks all workers of `up`.
        rows = rows_in(run("health", "--ready").stdout)
        assert [row["ready"] for row in rows] == [True, True]
        assert len({row["pid"] for row in rows}) == 2
        assert run_at_terminal("health") == (0, "".join(f"worker {row['pid']}: live\n" for row in rows))
        doctor = run("doctor")
        assert doctor.returncode == 0, doctor.stdout
        assert "maxmemory" not in doctor.stdout
        assert doctor.stderr == ""
        code, output = run_at_terminal("submit", str(file), "--wait")
        assert code == 0, output
        assert output.count("needs") == 1
        assert sum(" accepted " in line or " rejected " in line for line in output.splitlines()) == 3
        for command in (["status", "0"], ["decisions"], ["doctor"], ["stats"], ["explain", "0"]):
            _, output = run_at_terminal(*command)
            assert "{" not in output, command
        for command in (["stats"], ["doctor"]):
            assert rows_in(run(*command).stdout)


def test_a_demo_without_an_embedder_notes_that_once(tmp_path: Path) -> None:
    # Neither the demo nor its worker may use the broker that is configured.
    (tmp_path / "url").write_text("redis://127.0.0.1:1/0\n")
    demo = run("demo", KP_EMBEDDING_EMBEDDER="none", KP_BROKER_URL_FILE=str(tmp_path / "url"))
    assert demo.returncode == 0, demo.stderr
    assert demo.stderr.count("there is no embedder, so every novelty is 0.5") == 1
