"""The input and output of commands: files, streams that end early or are closed, and text that no terminal acts on."""

import json
import os
import signal
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

import pytest
from kp_scorer.characters import escaped_lines
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from kp_scorer.store import Store

from tests.support.builders import minimal_payload, step
from tests.support.commands import COMMAND, run, run_at_terminal, run_in_shell
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, opened, wait_until
from tests.support.traces import fresh_samples, jsonl, rows_in

SCORE: Final = ("score", "--set", "embedding.embedder=none", "-")


def ids(output: str) -> list[str]:
    return [json.loads(line)["trace_id"] for line in output.splitlines()]


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[tuple["subprocess.Popen[bytes]", IO[bytes], IO[bytes]]]:
    """Run a command; yield it with its stdin and its stdout."""
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "bufsize": 0}
    with opened(*COMMAND, *arguments, env=os.environ | variables, **streams) as process:
        assert process.stdin
        assert process.stdout
        yield process, process.stdin, process.stdout


def end_of(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Wait for a command to end; return its exit code and its stderr."""
    assert process.stderr
    code = process.wait(PATIENCE_S)
    return code, process.stderr.read().decode()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_json_is_utf_8_in_every_locale(encoding: str) -> None:
    trace = minimal_payload(objective="Når er det højvande → 高潮?")
    with running("convert", "-", PYTHONIOENCODING=encoding) as (process, stdin, stdout):
        stdin.write(jsonl(trace).encode())
        stdin.close()
        assert rows_in(stdout.readline().decode()) == [trace]
        assert end_of(process) == (0, "")


@pytest.mark.parametrize("packed", [False, True])
def test_score_prints_each_decision_as_its_trace_arrives(packed: bool) -> None:
    deflate = zlib.compressobj(wbits=31)
    with running(*SCORE) as (process, stdin, stdout):
        for trace in fresh_samples(3):
            line = jsonl(trace).encode()
            stdin.write(deflate.compress(line) + deflate.flush(zlib.Z_SYNC_FLUSH) if packed else line)
            assert ids(stdout.readline().decode()) == [trace["id"]]
        stdin.write(deflate.flush() if packed else b"")
        stdin.close()
        assert end_of(process)[0] == 0


def test_score_reports_a_conflict_and_scores_the_others() -> None:
    first, second = fresh_samples(2)
    done = run(*SCORE, stdin=jsonl(first, first | {"task": {"objective": "something else"}}, {}, first, second))
    assert done.returncode == 1
    printed = rows_in(done.stdout)
    assert [row.get("state", "decided") for row in printed] == ["decided", "conflict", "decided", "decided", "invalid"]
    assert [row["line"] for row in printed if "line" in row] == [2, 3]
    assert printed[0] == printed[2]


def test_score_names_the_way_to_other_thresholds_where_most_are_rejected() -> None:
    traces = jsonl(*fresh_samples(3))
    done = run(*SCORE, "--set", "scoring.threshold=0.99", stdin=traces)
    assert "scored 3 of 3: 0 accepted\nfor a share that you choose: `kp-scorer calibrate`" in done.stderr
    assert "kp-scorer calibrate" not in run(*SCORE, "--set", "scoring.threshold=0.1", stdin=traces).stderr


def test_ctrl_c_ends_a_command_that_waits_for_input() -> None:
    with running(*SCORE) as (process, stdin, stdout):
        stdin.write(jsonl(*fresh_samples(1)).encode())
        stdout.readline()
        process.send_signal(signal.SIGINT)
        code, stderr = end_of(process)
    assert (code, stderr.splitlines()[-1]) == (130, "Interrupted")
    assert "scored 1 of 1 so far" in stderr


def test_score_ends_when_nobody_reads_its_output() -> None:
    first, second = fresh_samples(2)
    with running(*SCORE) as (process, stdin, stdout):
        stdin.write(jsonl(first).encode())
        stdout.readline()
        stdout.close()
        stdin.write(jsonl(second).encode())
        code, stderr = end_of(process)
    assert (code, "Broken pipe" in stderr) == (141, False)


SAMPLES = REPOSITORY / "worker" / "kp_scorer" / "samples" / "traces.jsonl"


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_commands_work_though_stderr_cannot_be_written(settings: Settings, stderr: str) -> None:
    scored = run_in_shell(f"kp-scorer score {SAMPLES} --set embedding.embedder=none {stderr}")
    assert (scored.returncode, len(scored.stdout.splitlines())) == (0, 48)
    submitted = run_in_shell(f"kp-scorer submit {SAMPLES} {stderr}", KP_BROKER_URL=settings.broker.url)
    assert (submitted.returncode, len(submitted.stdout.splitlines())) == (0, 48)
    assert run_in_shell(f"kp-scorer score - --set embedding.embedder=maybe {stderr}").returncode == 2


REASONS: Final = {">&-": "Bad file descriptor", ">/dev/full": "No space left on device"}


@pytest.mark.parametrize(("command", "stdout"), [("--help", ">&-"), ("reference redis.conf", ">/dev/full")])
def test_stdout_that_cannot_be_written_is_an_error_in_one_line(command: str, stdout: str) -> None:
    done = run_in_shell(f"kp-scorer {command} {stdout}")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"kp-scorer: stdout: {REASONS[stdout]}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stdout", REASONS)
def test_submit_sends_all_traces_though_stdout_cannot_be_written(settings: Settings, stdout: str) -> None:
    done = run_in_shell(f"kp-scorer submit {SAMPLES} {stdout}", KP_BROKER_URL=settings.broker.url)
    assert done.returncode == 2
    assert done.stderr.endswith(f"kp-scorer: stdout: {REASONS[stdout]}; submitted 48 of 48 all the same\n")
    with Store.open(settings) as store:
        assert store.ledger.counts().pending == 48


def test_closed_stdin_is_an_error() -> None:
    done = run_in_shell("kp-scorer score - <&-")
    assert done.returncode == 2
    assert done.stderr.endswith("Invalid value for FILE: it cannot be read: Bad file descriptor\n")
    assert "Traceback" not in done.stderr


def test_ctrl_c_during_imports_aborts(tmp_path: Path) -> None:
    # This module stands in for Celery: it signals that the imports have begun, and blocks them.
    imports_began = tmp_path / "begun"
    (tmp_path / "celery.py").write_text(f"import pathlib, time; pathlib.Path({str(imports_began)!r}).touch(); time.sleep(60)")
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with running("stats", PYTHONPATH=search) as (process, _, _):
        wait_until(imports_began.exists)
        process.send_signal(signal.SIGINT)
        assert end_of(process) == (130, "\nInterrupted\n")


ODD: Final = "a\x1b]0;owned\x07\x1b[2J\x7f\x9b31m\u202egnp.exe\u2028c"


def test_nothing_that_score_prints_acts_on_a_terminal() -> None:
    payloads = [
        minimal_payload(trace_id=f"kp:trace:{ODD}"),
        minimal_payload(domain=ODD),
        minimal_payload(objective=ODD, steps=[step("thought", ODD, content=ODD, input={ODD: ODD})]),
    ]
    lines = [json.dumps(payload, ensure_ascii=False) for payload in payloads]
    lines += [ODD.replace("\u2028", ""), f'{{"{ODD}": 1']
    done = run(*SCORE, stdin="\n".join(lines))
    assert escaped_lines(done.stdout + done.stderr) == done.stdout + done.stderr
    states = [row.get("state", "decided") for row in rows_in(done.stdout)]
    assert states == ["invalid", "invalid", "decided", "invalid", "invalid"]
    assert "line 2: metadata.task_domain: expected no control" in done.stderr


OF_IDS: Final = (
    ("status", ODD, f"kp:trace:{ODD}"),
    ("forget", ODD),
    ("dead-letter", "list", ODD),
    ("cache", "unpin", ODD),
    ("status", "--set", f"{ODD}=1", "a"),
    (ODD,),
)


@pytest.mark.parametrize("arguments", OF_IDS, ids=lambda arguments: " ".join(arguments).replace(ODD, "ODD"))
def test_nothing_that_a_command_repeats_acts_on_a_terminal(arguments: tuple[str, ...], settings: Settings) -> None:
    code, output = run_at_terminal(*arguments, **as_environment(settings))
    assert code in (0, 1, 2)
    assert escaped_lines(output) == output
    assert "Traceback" not in output


@pytest.mark.parametrize("arguments", [("status",), ("dead-letter", "list")], ids=" ".join)
def test_an_id_that_is_no_unicode_is_unknown(arguments: tuple[str, ...], settings: Settings) -> None:
    code, output = run_at_terminal(*arguments, os.fsdecode(b"a\xff"), **as_environment(settings))
    assert code in (1, 2)
    assert "Traceback" not in output
