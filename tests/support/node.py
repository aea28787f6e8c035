"""The Node.js examples of the documents, with the packages from npm that they need."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tests.support.paths import REPOSITORY
from tests.support.processes import PATIENCE_S, output_of

EXAMPLES: Final = REPOSITORY / "tests" / "acceptance" / "node"
_PACKAGES: Final = ("package.json", "package-lock.json")


def installed() -> Path:
    """Return a folder with the present examples and with their packages, which are installed once and kept between runs."""
    versions = hashlib.sha256(b"".join((EXAMPLES / name).read_bytes() for name in _PACKAGES)).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kp-scorer-node-{os.getuid()}-{versions}"
    if not folder.is_dir():
        making = Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
        for name in _PACKAGES:
            shutil.copy(EXAMPLES / name, making)
        output_of("npm", "ci", "--no-audit", "--no-fund", "--loglevel=error", cwd=making)
        making.rename(folder)
    # The folder is in a shared place, so another user could have made it.
    assert folder.stat().st_uid == os.getuid()
    for example in examples():
        shutil.copy(example, folder)
    return folder


def examples() -> list[Path]:
    return sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".mjs", ".mts"))


def run(folder: Path, example: str, *arguments: str, stdin: str = "", variables: Mapping[str, str] | None = None) -> str:
    runner = ["npx", "--no-install", "tsx"] if example.endswith(".mts") else ["node"]
    environment = os.environ | dict(variables or {})
    return output_of(*runner, example, *arguments, cwd=folder, env=environment, input=stdin, timeout=PATIENCE_S)
