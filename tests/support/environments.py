"""Environments of their own, in which the package is installed and not found by way of the checkout."""

import sys
import sysconfig
from pathlib import Path

from tests.support.processes import output_of


def build_wheel(source: Path, directory: Path) -> Path:
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source))
    (built,) = directory.glob("*.whl")
    return built


def install_wheel(wheel: Path, directory: Path) -> Path:
    """Make an environment with a wheel, and with what it depends on from this one; return the folder of its commands."""
    output_of(sys.executable, "-m", "venv", "--without-pip", str(directory))
    _pip("--python", str(directory / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = directory.glob("lib/python*/site-packages")
    # Of a folder that a .pth file adds, the .pth files are not read: the checkout stays out, wherever it is installed from.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory / "bin"


def _pip(*arguments: str) -> None:
    output_of(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
