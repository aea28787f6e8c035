"""Convert a sentence-transformers model to OpenVINO.

Runs in its own process, so that torch and transformers, which take seconds and hundreds of megabytes, never enter a worker.
"""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from sentence_transformers import SentenceTransformer

from kp_scorer.embedding.openvino_engine import openvino
from kp_scorer.embedding.torch_engine import load_model, unit_vectors

_TOLERANCE: Final = 1e-4
_LONGEST_CHECKED: Final = 1_024  # Tokens of the longest text that is checked: a longer one would take minutes.


class _UnitVectors(torch.nn.Module):
    """The model with normalisation at its end and, if it masks ``keys_only``, a mask over these.

    Otherwise the model builds a mask over every query and key, as large as the attention itself, in each forward pass.
    """

    def __init__(self, model: SentenceTransformer, keys_only: bool) -> None:
        super().__init__()
        self._model = model
        self._keys_only = keys_only

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Turn ids and mask, int64 of shape (texts, tokens), into float32 unit vectors of shape (texts, dimensions)."""
        # Added to the attention scores, so that padding gets a share of exactly 0.
        keys = (mask[:, None, None, :].float() - 1) * 1e4 if self._keys_only else None
        return unit_vectors(self._model, ids, mask, keys)


def convert(path: Path, tokenizer: Path, max_tokens: int, target: Path) -> None:
    """Write the converted model, with float16 weights, to ``target`` and a ``.bin`` file beside it.

    Raises as :func:`load_model` does, and ValueError if the converted model's vectors differ from the model's.
    """
    model = load_model(path, tokenizer, "cpu")
    body: Any = model.transformers_model
    size = body.config.vocab_size
    # Tracing records only the code path of the example; other shapes show whether it serves them too.
    checked = [_example(*shape, size) for shape in ((1, 3), (3, min(40, max_tokens)), (2, min(max_tokens, _LONGEST_CHECKED)))]
    with torch.inference_mode():
        expected = [unit_vectors(model, ids, mask) for ids, mask in checked]
        # Models whose attention is causal, or reaches only so far, need masks of their own making.
        for keys_only in (True, False):
            if not keys_only:
                # Where nothing is left to attend to, as in padding, OpenVINO makes NaN of masks that are not numbers.
                body.set_attn_implementation("eager")
            try:
                converted = openvino.convert_model(_UnitVectors(model, keys_only), example_input=_example(2, 8, size))
                compiled = openvino.compile_model(converted, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
                vectors = [torch.from_numpy(compiled([ids.numpy(), mask.numpy()])[0]) for ids, mask in checked]
            except Exception:
                if keys_only:
                    continue
                raise
            if all(torch.allclose(*pair, atol=_TOLERANCE) for pair in zip(vectors, expected, strict=True)):
                openvino.save_model(converted, target, compress_to_fp16=True)
                return
    raise ValueError("the converted model gives other vectors")


def _example(texts: int, tokens: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids below ``size``, and a mask that hides the end of the first text, both int64 of shape (texts, tokens)."""
    ids = torch.arange(texts * tokens).reshape(texts, tokens) % size
    mask = torch.ones_like(ids)
    mask[0, tokens - tokens // 3 :] = 0
    return ids, mask


def main() -> None:
    """Convert a model: arguments are its directory, its tokenizer's file, the most tokens that it takes, and the target."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    path, tokenizer, max_tokens, target = sys.argv[1:]
    convert(Path(path), Path(tokenizer), int(max_tokens), Path(target))
