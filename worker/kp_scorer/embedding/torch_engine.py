"""The engine on torch and sentence-transformers: on a GPU with half precision, or on CPU with single precision."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

# No model is downloaded at run time. Set before transformers and the hub client are imported, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
import transformers
from sentence_transformers import SentenceTransformer

from kp_scorer.embedding.embedder import MAX_TOKENS, Ids, Vectors, padded
from kp_scorer.errors import SettingsError

_MAX_TOKENS: Final = {"cpu": 4_096, "cuda": 65_536}
"""Tokens of one forward pass: on CPU 8 full texts or a hundred short ones, on a GPU 128 full texts."""


class TorchEngine:
    """Runs a sentence-transformers model without conversion."""

    step = MAX_TOKENS
    streams = 1

    def __init__(self, model_path: Path, threads: int, device: Literal["cpu", "cuda"]) -> None:
        """Load the model; ``threads`` is how many threads torch uses on CPU.

        Raises:
            SettingsError: the directory holds no model that sentence-transformers can load.
        """
        torch.set_num_threads(threads)
        self._model = load_model(model_path, device)
        self._device = torch.device(device)
        self._pad_id = int(self._model.tokenizer.pad_token_id)
        self.max_tokens = _MAX_TOKENS[device]
        self.name = "torch f16 on a GPU" if device == "cuda" else f"torch f32 on {threads} threads"
        dimensions = self._model.get_embedding_dimension()
        assert dimensions is not None
        self.dimensions = int(dimensions)

    def run(self, groups: Sequence[Sequence[Ids]]) -> list[Vectors]:
        """Run a forward pass for each group of texts; see :class:`~kp_scorer.embedding.embedder.Engine`."""
        return [self.run_pass(group) for group in groups]

    def run_pass(self, group: Sequence[Ids], *, together: bool = True) -> Vectors:
        """Run one forward pass; see :class:`~kp_scorer.embedding.embedder.Engine`."""
        arrays = padded(group, max(map(len, group)), self._pad_id)
        ids, mask = (torch.from_numpy(array).to(self._device) for array in arrays)
        features = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros_like(ids)}
        # Half precision only for matrix products: in sums over 512 tokens and in norms it would lose digits that scores need.
        half = torch.autocast("cuda", torch.float16, enabled=self._device.type == "cuda")
        with torch.inference_mode(), half:
            output: torch.Tensor = self._model.forward(features)["sentence_embedding"]
        vectors: Vectors = torch.nn.functional.normalize(output.float(), dim=1).cpu().numpy()
        return vectors


def load_model(model_path: Path, device: str) -> SentenceTransformer:
    """Load a sentence-transformers model from a local directory.

    Raises:
        SettingsError: the directory holds no model that sentence-transformers can load.
    """
    transformers.utils.logging.disable_progress_bar()
    try:
        return SentenceTransformer(str(model_path), device=device, local_files_only=True).eval()
    except Exception as error:
        raise SettingsError(f"embedding.model: {model_path} cannot be loaded ({type(error).__name__})") from error
