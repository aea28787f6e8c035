"""Programs that tests need and a machine may lack."""

import os
import shutil

import pytest


def required(program: str, package: str = "", hint: str = "") -> str:
    """Where a program is; skips the test where there is none, and fails it under CI, which installs them.

    The reason names Debian's package, by default of the program's name, or gives another hint.
    """
    path = shutil.which(program)
    if not path:
        hint = hint or f"install Debian's package {package or program}"
        missing = f"there is no {program} on the PATH: {hint}"
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    return path
