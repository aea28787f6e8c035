"""Programs and packages that tests need and a machine may lack."""

import os
import shutil
from importlib.util import find_spec

import pytest


def required(program: str, package: str = "", hint: str = "") -> str:
    """Return the path of a program. If there is none, skip the test, or fail it under CI, which installs all of them.

    The reason names Debian's package, which by default has the program's name, or gives another hint.
    """
    path = shutil.which(program)
    if not path:
        hint = hint or f"install Debian's package {package or program}"
        _lacks(f"there is no {program} on the PATH: {hint}")
    return str(path)


def require_torch() -> None:
    """Skip the test where torch is not installed, which only models other than the default one need; fail it under CI."""
    if not (find_spec("torch") and find_spec("sentence_transformers")):
        _lacks("there is no torch: make torch")


def _lacks(missing: str) -> None:
    assert "CI" not in os.environ, missing
    pytest.skip(missing)
