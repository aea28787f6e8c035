"""Choose the embedder that the settings ask for, and the engine that is the fastest here."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from worker.cores import usable_cores
from worker.embedding.embedder import Embedder
from worker.embedding.engine import Engine, EngineUnavailable
from worker.embedding.model import ModelFiles, find_model, is_installed
from worker.errors import SettingsError
from worker.settings import EmbeddingSettings

_MOST_THREADS: Final = 8
"""Side by side, threads that wait for the longest of a batch's texts add up: more cores are for more workers."""

_GPU_DEVICES: Final = ("nvidia[0-9]*", "dxg", "kfd")
"""Device nodes of NVIDIA's driver, of the same under Windows' Linux, and of AMD's, which torch calls CUDA too."""

log = logging.getLogger("worker.embedding")


def select_embedder(settings: EmbeddingSettings) -> Embedder | None:
    """Load the embedder, or return None where novelty is to stay unknown.

    Raises:
        SettingsError: the embedder is required and not installed, or the model or the chosen engine cannot be loaded.
    """
    if settings.embedder == "none":
        return None
    try:
        return _load(settings)
    except EngineUnavailable as error:
        if settings.required or settings.embedder != "auto":
            raise SettingsError(
                f"embedding.required: an embedder is required and {error}; "
                "install kp-scorer[embedding], or set embedding.required = false to score with a novelty of 0.5"
            ) from error
        return None


def _load(settings: EmbeddingSettings) -> Embedder:
    if not is_installed("tokenizers"):
        raise EngineUnavailable("tokenizers is not installed")
    model = find_model(settings.model)
    if model is None:
        raise EngineUnavailable("embedding.model is empty and the package with the default weights is not installed")
    # Imported here, as the engines are below, because the package is to be usable without any of them installed.
    from worker.embedding.text_embedder import TextEmbedder
    from worker.embedding.tokens import Tokens

    tokens = Tokens(model.tokenizer)
    return TextEmbedder(model, tokens, _load_engine(settings, model))


def _load_engine(settings: EmbeddingSettings, model: ModelFiles) -> Engine:
    """Load the first engine that can run here; EngineUnavailable says why none can."""
    threads = settings.threads or min(usable_cores(), _MOST_THREADS)
    reasons = []
    for load in _CANDIDATES[settings.embedder]:
        try:
            return load(model, threads)
        except EngineUnavailable as error:
            reasons.append(str(error))
    raise EngineUnavailable(" and ".join(reasons))


def _load_torch_on_gpu(model: ModelFiles, threads: int) -> Engine:
    # Importing torch just to hear that there is no GPU would cost seconds and hundreds of megabytes.
    if not (any(any(Path("/dev").glob(pattern)) for pattern in _GPU_DEVICES) and _has_torch()):
        raise EngineUnavailable("there is no GPU")
    with _uncollected():
        from worker.embedding.torch_engine import TorchEngine, has_gpu
    if not has_gpu():
        raise EngineUnavailable("torch sees no GPU")
    return TorchEngine(model.path, threads, "cuda")


def _load_openvino(model: ModelFiles, threads: int) -> Engine:
    if not is_installed("openvino"):
        raise EngineUnavailable("openvino is not installed")
    from worker.embedding.converted import converted_model
    from worker.embedding.openvino_engine import OpenVinoEngine

    try:
        with converted_model(model) as file:
            return OpenVinoEngine(file, threads)
    except EngineUnavailable as error:
        # Whatever comes instead is several times slower.
        log.warning("openvino_unavailable: %s", error)
        raise


def _load_torch_on_cpu(model: ModelFiles, threads: int) -> Engine:
    if not _has_torch():
        raise EngineUnavailable("sentence-transformers is not installed")
    with _uncollected():
        from worker.embedding.torch_engine import TorchEngine
    return TorchEngine(model.path, threads, "cpu")


def _has_torch() -> bool:
    return is_installed("torch", "sentence_transformers")


@contextmanager
def _uncollected() -> Iterator[None]:
    """Import torch in this: collecting garbage among the million objects it makes, all of which stay, takes a sixth longer."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


_CANDIDATES: Final[dict[str, tuple[Callable[[ModelFiles, int], Engine], ...]]] = {
    "auto": (_load_torch_on_gpu, _load_openvino, _load_torch_on_cpu),
    "openvino": (_load_openvino,),
    "torch": (_load_torch_on_gpu, _load_torch_on_cpu),
}
