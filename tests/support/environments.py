"""Virtual environments in which the built package is installed, so that the checkout cannot be imported by accident."""

import sys
import sysconfig
from pathlib import Path

from tests.support.processes import output_of


def build_wheel(source: Path, directory: Path) -> Path:
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory), str(source))
    (built,) = directory.glob("*.whl")
    return built


def install_wheel(wheel: Path, directory: Path) -> Path:
    """Make an environment with a wheel and with the dependencies of this environment; return the folder of its commands."""
    output_of(sys.executable, "-m", "venv", "--without-pip", str(directory))
    _pip("--python", str(directory / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel))
    (packages,) = directory.glob("lib/python*/site-packages")
    # Python does not read the .pth files of a folder that a .pth file adds, so that an editable install of the checkout stays
    # out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return directory / "bin"


def _pip(*arguments: str) -> None:
    output_of(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments)
