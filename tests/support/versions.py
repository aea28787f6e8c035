"""The version before this one, installed beside it, and what both versions do on the same queues and the same Redis."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from tests.support.environments import build_wheel, install_wheel
from tests.support.paths import REPOSITORY
from tests.support.processes import CRASHING_WORKER, Worker

_TELL: Final = "import importlib.metadata, kp_scorer; print(importlib.metadata.version('kp-scorer'), kp_scorer.__file__)"


class Version(NamedTuple):
    """An installed version of the package, and the source tree with the tests that came with it."""

    python: Path
    source: Path

    def run(self, variables: Mapping[str, str], *arguments: str, stdin: str = "") -> list[dict[str, Any]]:
        """Run a command to its end, which must be a good one, and return the JSON lines that it printed."""
        done = subprocess.run(
            [self.python, "-m", "kp_scorer.cli", *arguments],
            cwd=self.source,
            env=self._environment(variables),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def worker(self, variables: Mapping[str, str], log: Path) -> Iterator[Worker]:
        """Run a worker whose batches can be slowed down; it is ready."""
        with log.open("wb") as output:
            process = subprocess.Popen(
                [self.python, "-m", *CRASHING_WORKER],
                cwd=self.source,
                env=self._environment(variables) | {"KP_LOG_FORMAT": "json"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        started = Worker(process, log)
        try:
            started.wait_until_ready()
            yield started
        finally:
            started.stop()

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        # Only this version may be found by way of the checkout.
        hidden = () if self == this_version() else ("PYTHONPATH",)
        return {name: value for name, value in os.environ.items() if name not in hidden} | dict(variables)


def this_version() -> Version:
    """The one under test."""
    return Version(Path(sys.executable), REPOSITORY)


def install_previous(directory: Path) -> Version:
    """Install the version before this one, from the history of the checkout; skip the test where there is none."""
    commit = _previous_commit()
    source = directory / "source"
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit))) as archive:
        archive.extractall(source, filter="data")
    binaries = install_wheel(build_wheel(source, directory), directory / "environment")
    found = Version(binaries / "python", source)
    told = subprocess.run(
        [found.python, "-c", _TELL],
        cwd=source,
        env=found._environment({}),
        capture_output=True,
        text=True,
        check=True,
    )
    version, file = told.stdout.split()
    assert version == _version_in((source / "pyproject.toml").read_text("utf-8"))
    assert Path(file).is_relative_to(directory / "environment")
    return found


def _previous_commit() -> str:
    """The newest commit that has another version than the working tree."""
    if not (REPOSITORY / ".git").exists() or shutil.which("git") is None:
        pytest.skip("without git and the history of the checkout there is no version before this one")
    here = _version_in((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    try:
        changes = _git("log", "-G^version = ", "--format=%H", "--", "pyproject.toml").decode().split()
        for commit in ("HEAD", *(f"{change}^" for change in changes)):
            if _version_in(_git("show", f"{commit}:pyproject.toml").decode()) != here:
                return commit
    except subprocess.CalledProcessError as error:
        problem = error.stderr.decode().strip()
    else:
        problem = "none has another version"
    missing = f"the history of the checkout does not go back to a version before {here}: {problem}"
    if os.environ.get("CI"):
        pytest.fail(f"{missing}; fetch all of it")
    pytest.skip(missing)


def _version_in(pyproject: str) -> str:
    return str(tomllib.loads(pyproject)["project"]["version"])


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, check=True).stdout
