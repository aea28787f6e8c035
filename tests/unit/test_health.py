"""What a probe makes of what a worker noted, and of what is left of one that has ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from kp_scorer.cli.health import health
from kp_scorer.health import (
    Stall,
    State,
    directory_of,
    find,
    make_private,
    read,
    remove,
    sweep,
    why_not_live,
    why_not_ready,
    write,
)

MOVES = (Stall("consumer", 1.0, 120.0), Stall("batcher", 0.0, 120.0))


LONG_THERE = 1
"""The id of a process that was there before these tests."""


def state_of(pid: int = 0, **changed: object) -> State:
    return State(pid or os.getpid(), time.monotonic(), MOVES, ())._replace(**changed)  # type: ignore[arg-type]


@pytest.fixture
def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def younger() -> Iterator[int]:
    """The id of a process that has just begun."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield process.pid


def test_one_that_moves_and_lacks_nothing_is_live_and_ready() -> None:
    assert list(why_not_live(state_of())) == []
    assert list(why_not_ready(state_of())) == []


def test_one_that_waits_for_redis_is_live_and_not_ready() -> None:
    waiting = state_of(not_ready=("redis: it does not answer",))
    assert list(why_not_live(waiting)) == []
    assert list(why_not_ready(waiting)) == ["redis: it does not answer"]


def test_one_of_which_a_part_stands_still_is_neither_and_the_part_is_named() -> None:
    stalled = state_of(stalls=(*MOVES, Stall("message", 500.0, 420.0)))
    (reason,) = why_not_live(stalled)
    assert reason.startswith("message: it has stood still for 500 s")
    assert list(why_not_ready(stalled)) == [reason]


def test_what_is_old_says_nothing_of_one_that_runs() -> None:
    (reason,) = why_not_live(state_of(LONG_THERE, written_s=time.monotonic() - 11))
    assert f"process {LONG_THERE} has noted nothing for 11 s" in reason


def test_one_that_has_ended_is_told_from_one_that_stands_still(ended_pid: int) -> None:
    assert list(why_not_live(state_of(ended_pid))) == [f"process {ended_pid} has ended"]


def test_one_that_was_killed_has_ended_although_its_parent_has_not_noticed(younger: int) -> None:
    os.kill(younger, signal.SIGKILL)
    os.waitid(os.P_PID, younger, os.WEXITED | os.WNOWAIT)
    assert list(why_not_live(state_of(younger))) == [f"process {younger} has ended"]


def test_one_whose_id_another_process_has_got_since_has_ended(younger: int) -> None:
    ended = [f"process {younger} has ended"]
    assert list(why_not_live(state_of(younger, written_s=time.monotonic() - 60))) == ended
    # Written before the machine was started.
    assert list(why_not_live(state_of(LONG_THERE, written_s=time.monotonic() + 60))) == [f"process {LONG_THERE} has ended"]
    assert list(why_not_live(state_of(younger))) == []


def test_what_is_written_is_read(tmp_path: Path) -> None:
    noted = state_of(not_ready=("it was told to stop",))
    write(tmp_path, noted)
    assert find(tmp_path) == find(tmp_path, os.getpid()) == [noted]
    remove(tmp_path, os.getpid())
    assert find(tmp_path) == find(tmp_path, os.getpid()) == []
    assert list(tmp_path.iterdir()) == []


def test_the_one_that_runs_is_found_among_those_that_have_ended(tmp_path: Path, ended_pid: int) -> None:
    ended = state_of(ended_pid)
    write(tmp_path, ended)
    assert find(tmp_path) == [ended]
    write(tmp_path, state_of())
    assert [state.pid for state in find(tmp_path)] == [os.getpid()]
    assert find(tmp_path, ended_pid) == [ended]
    sweep(tmp_path)
    assert find(tmp_path, ended_pid) == []
    assert [state.pid for state in find(tmp_path)] == [os.getpid()]


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"pid": 1}', '{"pid": 1, "written_s": [], "stalls": [], "not_ready": []}']
)
def test_what_is_no_state_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "worker-1.json"
    path.write_text(text)
    assert read(path) is None
    assert find(tmp_path) == []


def test_the_directory_is_this_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = directory_of("")
    assert directory == tmp_path / f"kp-scorer-{os.geteuid()}"
    make_private(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    with pytest.raises(PermissionError):
        make_private(directory)
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        make_private(directory)


def test_the_command_imports_nothing_that_takes_long() -> None:
    code = "import sys, kp_scorer.cli.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "celery", "kombu", "redis", "pydantic", "rich", "openvino", "structlog"} & set(found)


def test_the_file_of_a_process_whose_id_another_one_has_is_passed_over(tmp_path: Path, younger: int) -> None:
    ours = state_of()
    for state in (ours, state_of(younger, written_s=time.monotonic() - 60)):
        write(tmp_path, state)
    assert find(tmp_path) == [ours]
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"worker-{os.getpid()}.json"]


def test_one_that_stands_still_is_found_among_those_that_move(tmp_path: Path) -> None:
    states = [state_of(), state_of(LONG_THERE, written_s=time.monotonic() - 11)]
    for state in states:
        write(tmp_path, state)
    sweep(tmp_path)
    assert sorted(find(tmp_path)) == sorted(states)


def test_the_command_says_of_each_worker_how_it_is_and_fails_if_one_stands_still(tmp_path: Path, younger: int) -> None:
    def asked(*options: str) -> tuple[int, dict[int, bool]]:
        done = CliRunner().invoke(health, ["live", *options], env={"KP_HEALTH_DIRECTORY": str(tmp_path)})
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return done.exit_code, {row["pid"]: row["live"] for row in rows}

    write(tmp_path, state_of())
    assert asked() == (0, {os.getpid(): True})
    write(tmp_path, state_of(younger))
    assert asked() == (0, {os.getpid(): True, younger: True})
    write(tmp_path, state_of(younger, stalls=(Stall("batcher", 121.0, 120.0),)))
    assert asked() == (1, {os.getpid(): True, younger: False})
    assert asked("--pid", str(os.getpid())) == (0, {os.getpid(): True})
    assert asked("--pid", str(younger)) == (1, {younger: False})


def test_what_is_no_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "worker-1.json")
    (tmp_path / "worker-2.json").symlink_to("/dev/zero")
    (tmp_path / "worker-3.json").write_text('{"pid": 1e999, "written_s": 0, "stalls": [], "not_ready": []}', "utf-8")
    (tmp_path / "worker-4.json").write_text("[" * 60_000, "utf-8")
    assert find(tmp_path) == []


def test_nothing_is_believed_that_others_may_have_written(tmp_path: Path) -> None:
    write(tmp_path, State(os.getpid(), time.monotonic(), (), ()))
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError):
        find(tmp_path)


def test_without_a_directory_for_temporary_files_there_is_a_name_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert directory_of("") == Path(f"/nowhere/kp-scorer-{os.geteuid()}")
