"""The command line as a whole: start-up, help, completion, and errors in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from kp_scorer.cli.main import commands

from tests.support.commands import COMMAND, ended
from tests.support.commands import run as run_process
from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S

HEAVY: Final = {"celery", "fastapi", "kombu", "numpy", "openvino", "pydantic", "redis", "rich", "structlog", "torch"}


@pytest.mark.parametrize(
    ("calls", "allowed"),
    [
        (["--help", "--version", "reference redis.conf", "health --port 1"], set()),
        (["schema trace"], {"pydantic"}),
        (["convert --help"], {"numpy", "pydantic", "rich", "structlog"}),
        (["status --help"], HEAVY - {"fastapi", "openvino", "torch"}),
    ],
)
def test_start_up_imports_only_what_a_command_needs(calls: list[str], allowed: set[str]) -> None:
    code = f"""
import sys
from kp_scorer.cli.main import main
for call in {calls!r}:
    sys.argv[1:] = call.split()
    try:
        main()
    except SystemExit:
        pass
print(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.__stderr__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    imported = set(done.stderr.splitlines()[-1].split())
    assert "click" in imported, done.stderr
    assert imported & HEAVY <= allowed


@pytest.mark.parametrize("file", ["config/kp-scorer.toml", "deploy/redis.conf"])
def test_reference_prints_the_configuration_that_the_repository_has(file: str) -> None:
    assert CliRunner().invoke(commands, ["reference", Path(file).name]).stdout == (REPOSITORY / file).read_text("utf-8")


@pytest.mark.parametrize(("message", "field"), [("trace", "@context"), ("decision", "schema_version")])
def test_schema_prints_a_json_schema(message: str, field: str) -> None:
    printed = json.loads(CliRunner().invoke(commands, ["schema", message]).stdout)
    assert printed["type"] == "object"
    assert field in printed["properties"]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("kp-scorer sc", ["plain,schema", "plain,score"]),
        ("kp-scorer dead-letter s", ["plain,show"]),
        ("kp-scorer score ./tr", ["file,./tr"]),
    ],
)
def test_commands_and_files_are_completed(typed: str, completed: list[str]) -> None:
    variables = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_KP_SCORER_COMPLETE": "bash_complete"}
    assert run_process(**variables).stdout.split() == completed


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["sumbit"], "No such command 'sumbit'. Did you mean 'submit'?; see `kp-scorer --help`"),
        (["score"], "Missing argument 'FILE|FOLDER|-...'; see `kp-scorer score --help`"),
        (["dead-letter", "show", "--all"], "No such option '--all'; see `kp-scorer dead-letter show --help`"),
        (["schema", "record"], "Invalid value for '{trace|decision}': 'record' is not one of 'trace', 'decision'."),
        (["score", "absent.jsonl"], "Invalid value for FILE: absent.jsonl: No such file or directory"),
        (["explain", "absent.jsonl"], "Invalid value for FILE: there is no file absent.jsonl"),
        (
            ["score", "-", "--set", "novelty.maxelements=3"],
            "novelty.maxelements: no setting has this name; is it novelty.max_elements?",
        ),
        (["score", "-", "--set", "x.y=3"], "x: no setting has this name; `kp-scorer reference kp-scorer.toml` lists them all"),
        (["explain", "4f", "--id", "4f"], "--id chooses from a file, and there is no file 4f; see `kp-scorer explain --help`"),
        (["stats", "--redis-url", "redis://127.0.0.1:1/0"], "is Redis running where redis.url says?"),
    ],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: str
) -> None:
    code, _, err = ended(capsys, monkeypatch, *arguments)
    assert code in (2, 3)
    assert err.count("\n") == 1
    assert err.startswith("kp-scorer: ")
    assert line in err


@pytest.mark.parametrize("command", ["up", "down"])
def test_a_user_without_a_home_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    code, _, err = ended(capsys, monkeypatch, command)
    assert (code, err.splitlines()[-1]) == (2, "kp-scorer: this user has no home: set HOME")


def test_a_full_disk_is_told_in_one_line() -> None:
    on_full_disk = ("bash", "-c", 'ulimit -f 0 && exec "$@"', "bash", *COMMAND, "up", "--set", "metrics.port=0")
    done = subprocess.run(on_full_disk, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (2, "kp-scorer: File too large\n")
