"""No command connects to a host that it was not told of, or writes outside its own folders, as its system calls show."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.processes import wait_until
from tests.support.required import required
from tests.support.traces import sample_traces

WATCHED: Final = "connect,sendto,sendmsg,sendmmsg,open,openat,creat,mkdir,mkdirat,rename,renameat,renameat2"
ADDRESS: Final = re.compile(r'inet_addr\("([^"]+)"\)|inet_pton\(AF_INET6, "([^"]+)"')
ASKED_FOR_A_NAME: Final = re.compile(r"htons\(53\)|/resolv\.conf|resolve/io\.systemd")
WRITES: Final = re.compile(r"\b(?:open\w*\(.*(?:O_WRONLY|O_RDWR|O_CREAT)|creat\(|mkdir|rename)")
PATH: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')


class Watched:
    """A home for a user who has nothing yet, and a record of the system calls of the processes that run there."""

    def __init__(self, place: Path) -> None:
        self._record = place / "seen"
        self._home = place / "home"
        self._own = [place / name for name in ("state", "tmp", "cache")]
        for directory in (self._home, *self._own):
            directory.mkdir(exist_ok=True)
        state, temporary, cache = self._own
        # OpenVINO takes these for signs of a CI job, in which it is quiet by itself.
        ci = ("CI", "TF_BUILD", "JENKINS_URL")
        # Once a test has imported torch, TORCHINDUCTOR_CACHE_DIR makes child processes write to another folder.
        outer = {name: value for name, value in os.environ.items() if name not in (*ci, "TORCHINDUCTOR_CACHE_DIR")}
        places = {"HOME": self._home, "XDG_STATE_HOME": state, "XDG_CACHE_HOME": cache, "TMPDIR": temporary}
        self._environment = {**outer, **{name: str(path) for name, path in places.items()}, "PYTHONDONTWRITEBYTECODE": "1"}
        self._traces = place / "traces.jsonl"

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start `kp-scorer` under strace with these arguments, where FILE stands for a file with one trace."""
        self._traces.write_text(json.dumps(sample_traces()[0]))
        command = [str(self._traces) if argument == "FILE" else argument for argument in arguments]
        strace = ["strace", "-f", "-qq", "--seccomp-bpf", "-e", f"trace={WATCHED}", "-o", str(self._record)]
        return subprocess.Popen(
            [*strace, sys.executable, "-P", "-m", "kp_scorer.cli", *command],
            cwd=self._home,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def foreign(self) -> list[str]:
        """Return the calls that connected to another machine, looked up a name, or wrote outside our directories.

        Files in the home directory, where nothing may be written, are added by their paths.
        """
        lines = self._record.read_text("utf-8", "replace").splitlines()
        assert any("kp_scorer" in line for line in lines), "nothing was seen"
        return [line for line in lines if self._is_foreign(line)] + [str(path) for path in self._home.rglob("*")]

    def _is_foreign(self, line: str) -> bool:
        addresses = ["".join(groups) for groups in ADDRESS.findall(line)]
        if ASKED_FOR_A_NAME.search(line) or any(address != "::1" and address[:4] != "127." for address in addresses):
            return True
        written = PATH.findall(line) if WRITES.search(line) else []
        # Relative paths are Redis' own in its data directory, or lead to the home directory, whose files `foreign` reports.
        return any(path.startswith("/") and not path.startswith(("/dev/", *map(str, self._own))) for path in written)


@pytest.fixture(autouse=True)
def _strace() -> None:
    required("strace")


@pytest.mark.parametrize(
    "command",
    [
        # The demo starts a worker with the model.
        pytest.param("demo", marks=pytest.mark.slow),
        "report FILE --output tmp/report.html --set embedding.embedder=words",
    ],
)
def test_a_command_is_quiet(command: str, tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    arguments = command.replace("tmp/", f"{tmp_path}/tmp/").split()
    output, _ = (process := watched.start(*arguments)).communicate(timeout=200)
    assert process.returncode == 0, output
    assert watched.foreign() == []


def test_a_service_is_quiet(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    with watched.start("up", "--set", "embedding.embedder=words") as process:
        assert process.stdout
        output = _until(process.stdout, "worker_ready")
        (child,) = wait_until(lambda: _children(process.pid))
        os.kill(child, signal.SIGINT)
        output += process.communicate(timeout=60)[0]
    assert process.returncode == 0, output
    assert watched.foreign() == []


def _until(lines: Iterator[str], word: str) -> str:
    output = ""
    for line in lines:
        output += line
        if word in line:
            return output
    raise AssertionError(output)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
