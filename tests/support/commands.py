"""The command line, run to its end."""

import os
import subprocess
import sys
from typing import Final

COMMAND: Final = (sys.executable, "-m", "kp_scorer.cli")


def run(*arguments: str, stdin: str = "", **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command with these variables beside those there are."""
    return _run([*COMMAND, *arguments], stdin, variables)


def run_in_shell(command: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a shell does, with the streams that it is given there."""
    return _run(f"{' '.join(COMMAND)} {command}", "", variables)


def _run(command: str | list[str], stdin: str, variables: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        shell=isinstance(command, str),
        input=stdin,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
