"""Convert a sentence-transformers model to OpenVINO.

Runs in its own process, so that torch and transformers, which take seconds and hundreds of megabytes, never enter a worker.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Final

import torch
from sentence_transformers import SentenceTransformer

from kp_scorer.embedding.openvino_engine import openvino
from kp_scorer.embedding.torch_engine import load_model

_TOLERANCE: Final = 1e-4


class _UnitVectors(torch.nn.Module):
    """The model with normalisation at its end and a mask over keys only.

    Otherwise the model builds a mask over every query and key, as large as the attention itself, in each forward pass.
    """

    def __init__(self, model: SentenceTransformer) -> None:
        super().__init__()
        self._model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Turn ids and mask, int64 of shape (texts, tokens), into float32 unit vectors of shape (texts, dimensions)."""
        transformer, *others = self._model
        # Added to the attention scores, so that padding gets a share of exactly 0.
        keys = (mask[:, None, None, :].float() - 1) * 1e4
        features = transformer({"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": keys})
        features["attention_mask"] = mask
        for module in others:
            features = module(features)
        return torch.nn.functional.normalize(features["sentence_embedding"], dim=1)


def convert(model_path: Path, target: Path) -> None:
    """Write the converted model, with float16 weights, to ``target`` and a ``.bin`` file beside it.

    Raises:
        SettingsError: the directory holds no model that sentence-transformers can load.
        ValueError: the converted model's vectors differ from the model's.
    """
    model = load_model(model_path, "cpu")
    with torch.inference_mode():
        converted = openvino.convert_model(_UnitVectors(model), example_input=_example(2, 8))
        compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        # Tracing records only the code path of the example; other shapes show whether it serves them too.
        for ids, mask in (_example(1, 3), _example(3, 40)):
            features = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": mask}
            expected = torch.nn.functional.normalize(model(features)["sentence_embedding"], dim=1)
            vectors = torch.from_numpy(compiled([ids.numpy(), mask.numpy()])[0])
            if not torch.allclose(vectors, expected, atol=_TOLERANCE):
                raise ValueError("the converted model gives other vectors")
    openvino.save_model(converted, target, compress_to_fp16=True)


def _example(texts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, and a mask that hides the end of the first text, both int64 of shape (texts, tokens)."""
    ids = torch.arange(texts * tokens).reshape(texts, tokens)
    mask = torch.ones_like(ids)
    mask[0, tokens - tokens // 3 :] = 0
    return ids, mask


def main() -> None:
    """Convert the model in the directory of the first argument to the file of the second."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
