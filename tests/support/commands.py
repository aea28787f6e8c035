"""Runs the command line, in this process or in others, and returns its output."""

import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import click
import pytest
from click.testing import CliRunner, Result
from kp_scorer.cli.main import commands
from kp_scorer.cli.main import run as run_program
from kp_scorer.local.embedded_redis import running
from kp_scorer.settings import Settings
from kp_scorer.settings.loading import as_environment
from pydantic import BaseModel

from tests.support.forking import start
from tests.support.processes import PATIENCE_S, opened, wait_until
from tests.support.traces import jsonl

COMMAND: Final = (sys.executable, "-m", "kp_scorer.cli")


def run(*arguments: str, stdin: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with these variables in addition to the present ones; its stdin is a pipe."""
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        reading, writing = os.pipe()
        process = start(("kp_scorer.cli", *arguments), os.environ | variables, reading, stdout.fileno(), stderr.fileno())
        os.close(reading)
        # A command that does not read all of its input may close the pipe.
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            pipe.write(stdin.encode())
        code = process.wait(PATIENCE_S)
        for stream in (stdout, stderr):
            stream.seek(0)
        return subprocess.CompletedProcess(arguments, code, stdout.read().decode(), stderr.read().decode())


def invoked(command: click.Command, *arguments: str | Path, stdin: str | bytes = b"", **options: Any) -> Result:
    """Run a command in this process. Its stdin is a real file, because commands read from its file descriptor."""
    with TemporaryFile() as file:
        file.write(stdin if isinstance(stdin, bytes) else stdin.encode())
        file.seek(0)
        return CliRunner().invoke(command, list(map(str, arguments)), input=file, **options)


def command(settings: Settings, *arguments: str, stdin: str | bytes = b"") -> Result:
    """Run ``kp-scorer`` with these settings, in this process."""
    return invoked(commands, *arguments, stdin=stdin, env=as_environment(settings))


@cache
def every_command() -> dict[str, click.Command]:
    """Return all commands, including those in groups, by the words that call them."""
    by_words: dict[str, click.Command] = {}
    for name in commands.commands:
        _, called, _ = commands.resolve_command(click.Context(commands), [name])
        assert called
        inner = called.commands if isinstance(called, click.Group) else {}
        by_words |= {name: called} | {f"{name} {own}": each for own, each in inner.items()}
    return by_words


def json_lines(*rows: object) -> bytes:
    """Return rows, which may be decisions, as the JSON Lines of a file."""
    return jsonl(*(row.model_dump(mode="json") if isinstance(row, BaseModel) else row for row in rows)).encode()


def jsonl_file(path: Path, *rows: object) -> Path:
    """Write rows to a file as JSON Lines; return its path."""
    path.write_bytes(json_lines(*rows))
    return path


def ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str, **variables: str
) -> tuple[int, str, str]:
    """Run ``kp-scorer`` in this process until it exits; return its exit code, stdout and stderr."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["kp-scorer", *arguments])
    with pytest.raises(SystemExit) as end:
        run_program()
    assert isinstance(end.value.code, int)
    return end.value.code, *capsys.readouterr()


def run_at_terminal(*arguments: str, **variables: str) -> tuple[int, str]:
    """Run a command whose stdout and stderr are a terminal of 80 columns; return its exit code and its output."""
    ours, theirs = pty.openpty()
    output = bytearray()
    variables = {"COLUMNS": "80", "TERM": "dumb", **variables}
    process = start(("kp_scorer.cli", *arguments), os.environ | variables, theirs, theirs, theirs)
    os.close(theirs)
    # Linux reports the end of the terminal as an error.
    with suppress(OSError):
        while chunk := os.read(ours, 65_536):
            output += chunk
    os.close(ours)
    return process.wait(PATIENCE_S), output.decode().replace("\r\n", "\n")


@contextmanager
def up(*options: str, **variables: str) -> Iterator[None]:
    """Run `kp-scorer up` during the block and end it by Ctrl-C; its workers may still be starting when the block begins."""
    with opened(*COMMAND, "up", *options, env=os.environ | variables, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(running)
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0


def run_in_shell(commands: str, directory: str | Path = ".", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a shell script that may call ``kp-scorer``, until one of its commands fails."""
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'kp-scorer() {{ {shlex.join(COMMAND)} "$@"; }}\n{commands}'],
        cwd=directory,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
