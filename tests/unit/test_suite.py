"""What the suite itself promises, shown by runs of it over tests of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from tests.support.paths import REPOSITORY
from tests.support.suite import RUN


def run(directory: Path, tests: str, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run these tests as the suite runs its own, with these variables beside the present ones."""
    (directory / "test_inner.py").write_text(dedent(tests), "utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI", RUN))}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-c", REPOSITORY / "pyproject.toml", "-p", "tests.conftest", *options, directory],
        cwd=REPOSITORY,
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


DRAWS = """
    from hypothesis import given, strategies as st

    @given(st.integers())
    def test_draws(number):
        print("drawn", number)
"""


def test_ci_draws_fresh_examples_and_says_how_to_draw_them_again(tmp_path: Path) -> None:
    first, second = (run(tmp_path, DRAWS, "-rP", "--numprocesses=1", CI="1").stdout for _ in range(2))
    (again,) = re.findall(r"--hypothesis-seed=\d+", first)
    repeated = run(tmp_path, DRAWS, "-rP", again, CI="1").stdout
    drawn = [re.findall(r"drawn .+", output) for output in (first, second, repeated)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert 10 < len(drawn[0]) < 50
