"""Converted models on disk: each made once for a model and a version of OpenVINO, then reused by every worker."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from kp_scorer.embedding.engine import EngineUnavailable
from kp_scorer.embedding.model import ModelFiles, is_installed

_CONVERSION: Final = 3
"""Version of the conversion: change it when models are converted differently, so that older files are not used."""

_CONVERT: Final = "import gc; gc.disable(); from kp_scorer.embedding.convert import main; main()"
"""Run in its own Python process. Without garbage collection, which finds hardly any, its imports take a sixth less time."""

_MODEL: Final = "model.xml"
_DIGESTS: Final = "digests.json"


def cache_dir() -> Path:
    """Directory of converted models, following the XDG base directories.

    Raises:
        RuntimeError: neither XDG_CACHE_HOME nor a home directory is known.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kp-scorer"


@contextmanager
def converted_model(model: ModelFiles) -> Iterator[Path]:
    """Convert the model unless it is cached, and yield the converted file, which exists until the context ends.

    Raises:
        EngineUnavailable: the model is not in the cache, and converting it failed.
    """
    cached = _cached(model)
    if cached:
        yield cached / _MODEL
        return
    with TemporaryDirectory(prefix="kp-scorer-") as directory:
        _convert(model, Path(directory))
        yield Path(directory) / _MODEL


def _cached(model: ModelFiles) -> Path | None:
    """The converted model's directory in the cache, filled if necessary; None if the cache cannot be written."""
    try:
        place = cache_dir() / f"{model.space}-openvino-{version('openvino')}-{_CONVERSION}"
        if _is_whole(place):
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            # When several workers start at once, one converts and the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(place):
                _fill(place, model)
        return place
    except (OSError, RuntimeError):
        return None


def _fill(place: Path, model: ModelFiles) -> None:
    """Convert to the directory ``place``, which appears whole or not at all, even if the process dies."""
    with TemporaryDirectory(prefix="new-", dir=place.parent) as directory:
        new = Path(directory) / place.name
        new.mkdir()
        _convert(model, new)
        digests = {file.name: _digest(file) for file in new.iterdir()}
        (new / _DIGESTS).write_text(json.dumps(digests), "utf-8")
        if place.exists():
            shutil.rmtree(place)
        new.rename(place)


def _is_whole(place: Path) -> bool:
    """Whether a converted model exists and is as it was written; a truncated file of weights would give wrong vectors."""
    try:
        digests = json.loads((place / _DIGESTS).read_text("utf-8"))
        return bool(digests) and all(_digest(place / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _convert(model: ModelFiles, directory: Path) -> None:
    if not is_installed("torch", "sentence_transformers"):
        raise EngineUnavailable("sentence-transformers, which is needed to convert the model, is not installed")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERT, model.path, directory / _MODEL],
        # OpenVINO's converter sends telemetry unless it detects a CI job.
        env=os.environ | {"CI": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise EngineUnavailable(f"{model.path} cannot be converted: {reason}")
