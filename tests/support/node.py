"""The examples in Node that the documents show, with the packages they need from npm."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.paths import REPOSITORY

EXAMPLES: Final = REPOSITORY / "tests" / "acceptance" / "node"
_PACKAGES: Final = ("package.json", "package-lock.json")


def installed() -> Path:
    """A folder with the examples as they are now and their packages, which are installed once and kept between runs."""
    versions = hashlib.sha256(b"".join((EXAMPLES / name).read_bytes() for name in _PACKAGES)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kp-scorer-node-{os.getuid()}-{versions}"
    if not folder.is_dir():
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        for name in _PACKAGES:
            shutil.copy(EXAMPLES / name, making)
        done = subprocess.run(
            ["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"],
            cwd=making,
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        making.rename(folder)
    # Others could have made it.
    assert folder.stat().st_uid == os.getuid()
    for example in examples():
        shutil.copy(example, folder)
    return folder


def examples() -> list[Path]:
    return sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".mjs", ".mts"))


def run(folder: Path, example: str, *arguments: str, stdin: str = "", variables: Mapping[str, str] | None = None) -> str:
    command = [*(["npx", "--no-install", "tsx"] if example.endswith(".mts") else ["node"]), example, *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | dict(variables or {}),
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, f"{example}: {done.stderr}"
    return done.stdout
