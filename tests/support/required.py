"""Programs that tests need and a machine may lack."""

import os
import shutil

import pytest


def required(program: str, hint: str = "") -> str:
    """Where a program is; skips the test where there is none, and fails it under CI, which installs them."""
    path = shutil.which(program)
    if not path:
        missing = f"there is no {program} on the PATH{hint and f': {hint}'}"
        assert "CI" not in os.environ, missing
        pytest.skip(missing)
    return path
