"""``kp-scorer`` with streams that are closed, full, or end too soon: it does its work, and never answers with a traceback."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.commands import COMMAND, run_in_shell
from tests.support.paths import REPOSITORY
from tests.support.processes import wait_until

SAMPLES = REPOSITORY / "worker" / "kp_scorer" / "samples" / "traces.jsonl"


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_what_is_for_programs_is_printed_though_nothing_can_be_said_to_people(settings: Settings, stderr: str) -> None:
    scored = run_in_shell(f"score {SAMPLES} --embedder none {stderr}")
    assert (scored.returncode, len(scored.stdout.splitlines())) == (0, 48)
    submitted = run_in_shell(f"submit {SAMPLES} {stderr}", KP_BROKER_URL=settings.broker.url)
    assert (submitted.returncode, len(submitted.stdout.splitlines())) == (0, 48)
    assert run_in_shell(f"score - --embedder maybe {stderr}").returncode == 2


@pytest.mark.parametrize("command", ["schema trace", "reference redis.conf", f"score {SAMPLES} --embedder none"])
def test_a_closed_stdout_is_named(command: str) -> None:
    done = run_in_shell(f"{command} >&-")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "kp-scorer: stdout: Bad file descriptor")
    assert "Traceback" not in done.stderr


def test_submit_sends_all_though_stdout_is_closed(settings: Settings) -> None:
    done = run_in_shell(f"submit {SAMPLES} >&-", KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 2
    assert done.stderr.endswith("kp-scorer: stdout: Bad file descriptor; submitted 48 of 48 all the same\n")
    with Store.open(settings) as store:
        assert store.ledger.counts().pending == 48


def test_help_for_a_full_disk_is_an_error_without_a_traceback() -> None:
    done = run_in_shell("--help >/dev/full")
    assert (done.returncode, done.stderr) == (2, "kp-scorer: stdout: No space left on device\n")


def test_a_closed_stdin_is_named() -> None:
    done = run_in_shell("score - <&-")
    assert done.returncode == 2
    assert done.stderr.endswith("Invalid value for FILE: it cannot be read: Bad file descriptor\n")
    assert "Traceback" not in done.stderr


def test_input_without_end_is_refused() -> None:
    done = run_in_shell("score /dev/zero")
    assert done.returncode == 2
    assert "line 1: expected its end within 268435456 bytes" in done.stderr


def test_ctrl_c_before_a_command_has_begun_ends_it_as_later(tmp_path: Path) -> None:
    # Says when the imports have begun, and holds them up.
    begun = tmp_path / "begun"
    (tmp_path / "celery.py").write_text(f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(60)")
    arguments = [*COMMAND, "up"]
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": search}, stderr=subprocess.PIPE, text=True) as up:
        wait_until(begun.exists)
        up.send_signal(signal.SIGINT)
        assert up.wait(10) == 1
        assert up.stderr
        assert up.stderr.read() == "Aborted!\n"
