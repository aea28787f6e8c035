"""The suite keeps its own promises, shown by runs of it over tests of its own."""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.support.paths import REPOSITORY
from tests.support.suite import RUN
from tests.support.traces import new_id


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
        timeout=200,
        check=False,
        # As a shell starts what runs in the background.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN),
    )


DRAWS = """
    import signal
    import pytest
    from hypothesis import given, settings, strategies as st

    @given(st.integers())
    def test_draws(number):
        print("drawn", number)

    def test_is_drawn_anew_each_time():
        assert not settings().derandomize

    def test_is_ended_by_ctrl_c():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
"""


def test_ci_draws_fresh_examples_and_says_how_to_draw_them_again(tmp_path: Path) -> None:
    first = run(tmp_path, DRAWS, "-rP", "--numprocesses=1", CI="1")
    assert first.returncode == 0, first.stdout
    (again,) = re.findall(r"--hypothesis-seed=\d+", first.stdout)
    drawn = [re.findall(r"drawn .+", each.stdout) for each in (first, run(tmp_path, DRAWS, "-rP", again, CI="1"))]
    assert drawn[0] == drawn[1]
    assert 10 < len(drawn[0]) < 50


LEAVES = """
    import os, subprocess, sys
    import pytest

    SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]

    def test_leaves_an_orphan():
        subprocess.run(["sh", "-c", '"$@" &', "sh", *SLEEP], check=True)

    def test_dies():
        subprocess.Popen(SLEEP)
        os._exit(1)

    @pytest.mark.parametrize("number", range(3))
    def test_needs(number):
        pytest.skip("there is no knife: buy one" if number else "there is no fork: find one")
"""


@pytest.mark.slow
def test_no_process_outlives_the_suite_and_each_reason_to_skip_takes_a_line(tmp_path: Path) -> None:
    mark = new_id()
    done = run(tmp_path, LEAVES, "--numprocesses=1", "--max-worker-restart=1", MARK=mark)
    assert done.returncode == 1
    assert [each for each in psutil.process_iter(["environ"]) if mark in str(each.info["environ"])] == []
    assert set(re.findall(r"^killed .*::(\w+)", done.stdout, re.MULTILINE)) == {"test_leaves_an_orphan", "test_dies"}
    skipped = re.findall(r"^skipped.*", done.stdout, re.MULTILINE | re.IGNORECASE)
    assert skipped == ["skipped 1: there is no fork: find one", "skipped 2: there is no knife: buy one"]
