"""Chooses the embedder that the settings ask for, and the fastest engine that runs here."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Final, Literal, NamedTuple

from kp_scorer.embedding.embedder import RECIPES, Embedder, Recipe
from kp_scorer.embedding.model import WEIGHTS_PACKAGE, ModelFiles, find_model, has_torch, is_installed
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.errors import EngineUnavailable, SettingsError
from kp_scorer.logs import library_logger
from kp_scorer.settings.sections import EmbeddingSettings, RecipeName

_MOST_THREADS: Final = 8  # Further threads speed up a pass only a little; more workers use further cores better.
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_GROUP: Final = Path("/proc/self/cgroup")  # The file that names the process's group, in cgroup version 2.
_GPU_DEVICES: Final = ("nvidia[0-9]*", "dxg", "kfd")  # The devices of NVIDIA, of WSL, and of AMD, which torch calls CUDA too.

log = library_logger(__name__)


def select_embedder(settings: EmbeddingSettings, recipe: RecipeName = "trace") -> Embedder | None:
    """Load the embedder; return None if the settings ask for none, or if they leave the choice open and no engine can run.

    Raises SettingsError if the embedder is named and not installed, or the model cannot be loaded.
    """
    if settings.embedder == "none":
        return None
    if settings.embedder == "words":
        return WordsEmbedder()
    try:
        return _load(settings, RECIPES[recipe])
    except EngineUnavailable as error:
        if settings.embedder != "auto":
            raise SettingsError(
                f"embedding.embedder: {settings.embedder} cannot be used: {error}; "
                "install kp-scorer[embedding], or set embedding.embedder to words, or to auto to score with a novelty of 0.5"
            ) from error
        return None


def is_embedder_installed(settings: EmbeddingSettings) -> bool:
    """Return whether the settings ask for an embedder whose packages are installed, without loading it.

    It may still fail to load.
    """
    if settings.embedder == "words":
        return True
    has_model = bool(settings.model) or is_installed(WEIGHTS_PACKAGE)
    has_engine = is_installed("tokenizers") and (is_installed("openvino") or has_torch())
    return settings.embedder != "none" and has_model and has_engine


def usable_cores(cgroup: Path = _CGROUP, group_file: Path = _OWN_GROUP) -> int:
    """Count the cores that the process may run on, at most as many as its share of processor time.

    More threads would use up the share at once and then stall until the next period. A part of a core counts as one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    group = PurePath()
    with suppress(OSError, ValueError):
        for line in group_file.read_text("utf-8").splitlines():
            if line.startswith("0::"):
                group = PurePath(line.removeprefix("0::").lstrip("/"))
    # Each group around that of the process may have a limit, too. Without one, its quota is "max".
    for each in (group, *group.parents):
        with suppress(OSError, ValueError):
            quota, period = (cgroup / each / "cpu.max").read_text("ascii").split()
            if quota.isdigit() and int(period) > 0:
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _load(settings: EmbeddingSettings, recipe: Recipe) -> Embedder:
    if not is_installed("tokenizers"):
        raise EngineUnavailable("tokenizers is not installed")
    model = find_model(settings.model)
    if model is None:
        raise EngineUnavailable("embedding.model is empty and the package with the default weights is not installed")
    threads = settings.threads or min(usable_cores(), _MOST_THREADS)
    reasons, candidates = [], _CANDIDATES[settings.embedder]
    for candidate in candidates:
        if missing := candidate.why_missing():
            reasons.append(missing)
            continue
        try:
            return candidate.load(model, recipe, threads)
        except EngineUnavailable as error:
            reasons.append(str(error))
            if settings.embedder == "auto" or candidate is not candidates[-1]:
                # Warn, because what is used instead is several times slower, or scores no novelty.
                log.warning("engine_unavailable", engine=candidate.engine, detail=str(error))
    raise EngineUnavailable(" and ".join(reasons))


def may_use_gpu(settings: EmbeddingSettings) -> bool:
    """Return whether the settings allow a GPU and there is one. Torch may still not see it."""
    return settings.embedder in ("auto", "torch") and _has_gpu()


def _has_gpu() -> bool:
    # Importing torch just to find no GPU would cost seconds and hundreds of megabytes.
    return any(any(Path("/dev").glob(pattern)) for pattern in _GPU_DEVICES) and has_torch()


def _load_torch(device: Literal["cpu", "cuda"], model: ModelFiles, recipe: Recipe, threads: int) -> Embedder:
    import torch

    from kp_scorer.embedding.torch_engine import TorchEmbedder

    if device == "cuda" and not torch.cuda.is_available():
        raise EngineUnavailable("torch sees no GPU")
    return TorchEmbedder(model, recipe, threads, device)


def _load_openvino(model: ModelFiles, recipe: Recipe, threads: int) -> Embedder:
    from kp_scorer.embedding.openvino_engine import OpenVinoEmbedder

    return OpenVinoEmbedder(model, recipe, threads)


class _Candidate(NamedTuple):
    engine: str
    why_missing: Callable[[], str]  # Returns the reason why the engine is not here; an empty text if it is.
    load: Callable[[ModelFiles, Recipe, int], Embedder]  # Imports the engine, because the package must work without it.


_TORCH: Final = (
    _Candidate("torch", lambda: "" if _has_gpu() else "there is no GPU", partial(_load_torch, "cuda")),
    _Candidate("torch", lambda: "" if has_torch() else "sentence-transformers is not installed", partial(_load_torch, "cpu")),
)
_OPENVINO: Final = _Candidate(
    "openvino", lambda: "" if is_installed("openvino") else "openvino is not installed", _load_openvino
)
_CANDIDATES: Final = {"auto": (_TORCH[0], _OPENVINO, _TORCH[1]), "openvino": (_OPENVINO,), "torch": _TORCH}
