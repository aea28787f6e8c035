"""``make`` says what a machine lacks before it installs anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY


@pytest.mark.parametrize(
    ("altered", "said"),
    [
        ("sys.version_info = (3, 10, 1)", "is 3.10: name another with PYTHON="),
        ("sys.modules['ensurepip'] = None", f"apt install python{sys.version_info.major}.{sys.version_info.minor}-venv"),
        ("", "there is no "),
    ],
)
def test_make_says_what_is_missing_before_it_installs(altered: str, said: str, tmp_path: Path) -> None:
    python = tmp_path / "python"
    if altered:
        (tmp_path / "sitecustomize.py").write_text(f"import sys; {altered}")
        python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    made = subprocess.run(
        ["make", "install", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == 2
    assert said in made.stderr
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {"python", "sitecustomize.py", "__pycache__"}
