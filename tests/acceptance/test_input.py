"""What commands read: files of every kind, and standard input as it comes."""

import gzip
import json
import os
import re
import signal
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

import pytest
from kp_scorer.settings import Settings, as_environment

from tests.support.commands import COMMAND, run
from tests.support.traces import fresh_samples, short_traces

SCORE: Final = ("score", "--embedder", "none", "-")


def lines(traces: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(trace).encode() + b"\n" for trace in traces)


def ids(output: str) -> list[str]:
    return [json.loads(line)["trace_id"] for line in output.splitlines()]


@contextmanager
def running(*arguments: str, **variables: str) -> Iterator[tuple["subprocess.Popen[bytes]", IO[bytes], IO[bytes]]]:
    """A command, its stdin and its stdout."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*COMMAND, *arguments], env=os.environ | variables, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield process, process.stdin, process.stdout
        finally:
            process.kill()


def end_of(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    """Exit code and stderr."""
    assert process.stderr
    code = process.wait(30)
    return code, process.stderr.read().decode()


@pytest.mark.parametrize("name", ["traces.jsonl", "traces.json", "traces.jsonl.gz", "traces.json.gz"])
def test_score_reads_files_of_every_kind(tmp_path: Path, name: str) -> None:
    traces = fresh_samples(40)
    content = lines(traces) if "jsonl" in name else json.dumps(traces, indent=1).encode()
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    done = run("score", "--embedder", "none", str(file))
    assert done.returncode == 0, done.stderr
    assert ids(done.stdout) == [trace["id"] for trace in traces]
    assert re.search(r"^scored: 40 of 40, [\d,.]+ a second$", done.stderr, re.MULTILINE)


def test_one_trace_alone_is_a_document(tmp_path: Path) -> None:
    (trace,) = fresh_samples(1)
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps(trace, indent=2).encode()))
    done = run("score", "--embedder", "none", str(file))
    assert ids(done.stdout) == [trace["id"]]


@pytest.mark.parametrize("packed", [False, True])
def test_score_prints_each_decision_as_its_trace_comes_in(packed: bool) -> None:
    deflate = zlib.compressobj(wbits=31)
    with running(*SCORE) as (process, stdin, stdout):
        for trace in fresh_samples(3):
            line = lines([trace])
            stdin.write(deflate.compress(line) + deflate.flush(zlib.Z_SYNC_FLUSH) if packed else line)
            assert ids(stdout.readline().decode()) == [trace["id"]]
        stdin.write(deflate.flush() if packed else b"")
        stdin.close()
        assert end_of(process)[0] == 0


def test_submit_prints_each_trace_as_it_comes_in(settings: Settings) -> None:
    with running("submit", "-", **as_environment(settings)) as (process, stdin, stdout):
        for trace in fresh_samples(3):
            stdin.write(lines([trace]))
            assert json.loads(stdout.readline()) == {"trace_id": trace["id"], "state": "pending"}
        stdin.close()
        assert end_of(process)[0] == 0


def test_submit_reads_a_gzipped_file_and_keeps_the_order(settings: Settings, tmp_path: Path) -> None:
    traces = short_traces(250, seed=21)
    file = tmp_path / "traces.jsonl.gz"
    file.write_bytes(gzip.compress(b"{}\n" + lines(traces)))
    done = run("submit", str(file), **as_environment(settings))
    assert done.returncode == 1
    invalid, *pending = [json.loads(line) for line in done.stdout.splitlines()]
    assert (invalid["line"], invalid["state"]) == (1, "invalid")
    assert pending == [{"trace_id": trace["id"], "state": "pending"} for trace in traces]
    assert "submitted 250 of 251" in done.stderr


def test_a_conflict_keeps_its_line_and_the_others_are_scored(tmp_path: Path) -> None:
    one, two = fresh_samples(2)
    file = tmp_path / "traces.jsonl"
    file.write_bytes(lines([one, one | {"task": {"objective": "something else"}}, {}, one, two]))
    done = run("score", "--embedder", "none", str(file))
    assert done.returncode == 1
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row.get("state", "decided") for row in found] == ["decided", "conflict", "invalid", "decided", "decided"]
    assert [row["line"] for row in found if "line" in row] == [2, 3]
    assert found[0] == found[3]


def test_ctrl_c_ends_a_command_that_waits_for_input() -> None:
    with running(*SCORE) as (process, stdin, stdout):
        stdin.write(lines(fresh_samples(1)))
        stdout.readline()
        process.send_signal(signal.SIGINT)
        code, said = end_of(process)
    assert (code, said.splitlines()[-1]) == (1, "Aborted!")


def test_a_command_that_nobody_reads_ends_though_its_input_does_not() -> None:
    one, two = fresh_samples(2)
    with running(*SCORE) as (process, stdin, stdout):
        stdin.write(lines([one]))
        stdout.readline()
        stdout.close()
        stdin.write(lines([two]))
        code, said = end_of(process)
    assert (code, said.splitlines()[-1]) == (2, "kp-scorer: stdout: Broken pipe")


def test_a_damaged_gzip_file_is_named_after_what_could_be_read(tmp_path: Path) -> None:
    (trace,) = fresh_samples(1)
    file = tmp_path / "traces.jsonl.gz"
    file.write_bytes(gzip.compress(lines([trace])) + gzip.compress(b"{}")[:-3])
    done = run("score", "--embedder", "none", str(file))
    assert done.returncode == 2
    assert ids(done.stdout)[0] == trace["id"]
    assert "Invalid value for FILE: it cannot be read: a gzip file that is cut off" in done.stderr
    assert "Traceback" not in done.stderr
