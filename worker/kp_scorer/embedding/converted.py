"""Converted models on disk: each made once for a model and a version of OpenVINO, then reused by every worker."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import structlog

from kp_scorer.embedding.engine import EngineUnavailable
from kp_scorer.embedding.model import ModelFiles, is_installed
from kp_scorer.errors import ModelUnconverted

_CONVERSION: Final = 3
"""Version of the conversion: change it when models are converted differently, so that older files are not used."""

_CONVERT: Final = "import gc; gc.disable(); from kp_scorer.embedding.convert import main; main()"
"""Run in its own Python process. Without garbage collection, which finds hardly any, its imports take a sixth less time."""

_MODEL: Final = "model.xml"
_DIGESTS: Final = "digests.json"
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH

# By way of the standard library, because this also runs in programs of others, whose stdout is not ours to write to.
log = structlog.wrap_logger(logging.getLogger(__name__), processors=[structlog.stdlib.render_to_log_kwargs])


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


@contextmanager
def model_in_cache(model: ModelFiles) -> Iterator[Path]:
    """Yield the converted file that is cached; neither convert nor write anything.

    Raises:
        ModelUnconverted: the model is not in the cache, and :func:`converted_model` would convert it.
        EngineUnavailable: it is not, and cannot be converted.
    """
    try:
        place = _place(model)
        is_safe = _is_ours(place.parent) or place.parent.stat().st_uid == os.geteuid()
    except (OSError, RuntimeError):
        is_safe = False
    if not (is_safe and _is_whole(place)):
        _check_converter()
        raise ModelUnconverted(f"embedder: {model.name} was not converted yet")
    yield place / _MODEL


def _place(model: ModelFiles) -> Path:
    return cache_dir() / f"{model.space}-openvino-{version('openvino')}-{_CONVERSION}"


def _cached(model: ModelFiles) -> Path | None:
    """The converted model's directory in the cache, filled if necessary; None if the cache cannot be used."""
    try:
        place = _place(model)
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        if not (_is_ours(place.parent) or _made_ours(place.parent)):
            log.warning("model_cache_ignored", directory=str(place.parent), detail="another user can write to it")
            return None
        if _is_whole(place):
            return place
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            # When several workers start at once, one converts and the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(place):
                _fill(place, model)
        return place
    except (OSError, RuntimeError):
        return None


def _is_ours(path: Path) -> bool:
    """Whether nobody but this user and root can change a file or directory."""
    found = path.stat()
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & _WRITABLE_BY_OTHERS


def _made_ours(path: Path) -> bool:
    """Whether a file or directory is this user's own; if so, nobody else can change it any more."""
    found = path.stat()
    if found.st_uid != os.geteuid():
        return False
    path.chmod(stat.S_IMODE(found.st_mode) & ~_WRITABLE_BY_OTHERS)
    return True


def _fill(place: Path, model: ModelFiles) -> None:
    """Convert to the directory ``place``, which appears whole or not at all, even if the process dies."""
    if place.exists():
        log.warning("model_converted_again", directory=str(place), detail="damaged, or another user could write to it")
    prefix = f"new-{place.name}-"
    for left in place.parent.glob(f"{prefix}*"):
        # By a process that was killed, for whoever fills this place holds its lock.
        shutil.rmtree(left, ignore_errors=True)
    with TemporaryDirectory(prefix=prefix, dir=place.parent) as directory:
        new = Path(directory) / place.name
        new.mkdir(mode=0o755)
        _convert(model, new)
        digests = {file.name: _digest(file) for file in new.iterdir()}
        (new / _DIGESTS).write_text(json.dumps(digests), "utf-8")
        for file in new.iterdir():
            # Whatever the umask is. Others may read: an image is often built by one user and run by another.
            _made_ours(file)
        if place.exists():
            shutil.rmtree(place)
        new.rename(place)


def _is_whole(place: Path) -> bool:
    """Whether a converted model exists and is as this user or root wrote it; other weights would give other scores."""
    try:
        if not all(_is_ours(path) for path in (place, *place.iterdir())):
            return False
        digests = json.loads((place / _DIGESTS).read_text("utf-8"))
        return bool(digests) and all(_digest(place / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "blake2b").hexdigest()


def _check_converter() -> None:
    if not is_installed("torch", "sentence_transformers"):
        raise EngineUnavailable("sentence-transformers, which is needed to convert the model, is not installed")


def _convert(model: ModelFiles, directory: Path) -> None:
    _check_converter()
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CONVERT, model.path, directory / _MODEL],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise EngineUnavailable(f"{model.path} cannot be converted: {reason}")
