"""The engine on torch and sentence-transformers: on a GPU with half precision, or on CPU with single precision."""

import os
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Final, Literal

# No model is downloaded at run time. Set before transformers and the hub client are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
import transformers
from sentence_transformers import SentenceTransformer

from kp_scorer.embedding.embedder import Engine, Ids, Vectors, padded
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.text_embedder import Tokens
from kp_scorer.errors import SettingsError

_MAX_TOKENS: Final = {"cpu": 4_096, "cuda": 65_536}
"""Tokens of one forward pass: on CPU 8 full texts or a hundred short ones, on a GPU 128 full texts."""

_SAMPLE: Final = "Refund it: don't!"  # Short enough for any model, and with what tokenizers treat differently.


class TorchEngine(Engine):
    """Runs a sentence-transformers model without conversion."""

    step = 64

    def __init__(self, model: ModelFiles, threads: int, device: Literal["cpu", "cuda"]) -> None:
        """Load the model as :func:`load_model` does; ``threads`` is how many threads torch uses on CPU."""
        torch.set_num_threads(threads)
        self._model = load_model(model.path, model.tokenizer, device)
        self._device = torch.device(device)
        self._pad_id = int(self._model.tokenizer.pad_token_id or 0)
        self.max_tokens = _MAX_TOKENS[device]
        self.name = "torch f16 on a GPU" if device == "cuda" else f"torch f32 on {threads} threads"
        dimensions = self._model.get_embedding_dimension()
        assert dimensions is not None
        self.dimensions = int(dimensions)

    def run_pass(self, group: Sequence[Ids], *, together: bool) -> Vectors:
        """Run one forward pass; see the base class."""
        arrays = padded(group, max(map(len, group)), self._pad_id)
        ids, mask = (torch.from_numpy(array).to(self._device) for array in arrays)
        # Half precision only for matrix products: in sums over 512 tokens and in norms it would lose digits that scores need.
        half = torch.autocast("cuda", torch.float16, enabled=self._device.type == "cuda")
        with torch.inference_mode(), half:
            output = unit_vectors(self._model, ids, mask)
        vectors: Vectors = output.cpu().numpy()
        return vectors


def unit_vectors(
    model: SentenceTransformer, ids: torch.Tensor, mask: torch.Tensor, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """The float32 unit vectors of texts; their transformer is given ``keys`` for a mask, if any."""
    transformer, *others = model
    body: Any = model.transformers_model
    features = {"input_ids": ids, "attention_mask": mask if keys is None else keys}
    # Elsewhere it would be passed on to layers that do not expect it.
    if "token_type_ids" in signature(body.forward).parameters:
        features["token_type_ids"] = torch.zeros_like(ids)
    features = transformer(features) | {"attention_mask": mask}
    for module in others:
        features = module(features)
    return torch.nn.functional.normalize(features["sentence_embedding"].float(), dim=1)


def load_model(path: Path, tokenizer: Path, device: str) -> SentenceTransformer:
    """Load a sentence-transformers model from a local directory.

    SettingsError if sentence-transformers cannot, or makes other tokens of a text than the tokenizer's file.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        model = SentenceTransformer(str(path), device=device, local_files_only=True).eval()
        expected = model.preprocess([_SAMPLE], prompt="")["input_ids"][0].tolist()
    except Exception as error:
        raise SettingsError(f"embedding.model: {path} cannot be loaded ({type(error).__name__})") from error
    if Tokens(tokenizer).row(_SAMPLE).ids != expected:
        raise SettingsError(f"embedding.model: {tokenizer} makes other tokens than sentence-transformers does")
    return model
