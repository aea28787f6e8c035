"""The engine on torch: on a GPU in half precision, or on CPU in single precision."""

import os
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, Final, Literal

# No model is downloaded at run time. This must be set before transformers and the hub client are imported, which read it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer

from kp_scorer.embedding.embedder import MAX_TOKENS, Ids, Recipe, Vectors, padded
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.packed import PackedModel, PackedPasses
from kp_scorer.embedding.text_embedder import TextEmbedder
from kp_scorer.embedding.tokenizer import Tokens
from kp_scorer.errors import SettingsError
from kp_scorer.logs import library_logger

_MAX_TOKENS: Final = {"cpu": 4_096, "cuda": 65_536}  # The tokens of a pass: on CPU 8 full texts, on a GPU 128.
_SAMPLE: Final = "Refund it: don't!"  # Short enough for any model, and with characters that tokenizers treat differently.
_TOLERANCE: Final = 1e-4
_LONGEST_CHECKED: Final = 1_024  # The tokens of the longest text that is checked: a longer one would take minutes.

log = library_logger(__name__)


class TorchEmbedder(TextEmbedder):
    """Runs a sentence-transformers model, in packed passes if possible, otherwise in padded ones."""

    step = 64

    def __init__(self, model: ModelFiles, recipe: Recipe, threads: int, device: Literal["cpu", "cuda"]) -> None:
        """Load the model as :func:`load_model` does; ``threads`` is the number of threads that torch uses on CPU."""
        super().__init__(model, recipe)
        torch.set_num_threads(threads)
        self._model = load_model(model.path, model.tokenizer, model.max_tokens, device)
        self._device = torch.device(device)
        self._pad_id = int(self._model.tokenizer.pad_token_id or 0)
        self.max_tokens = _MAX_TOKENS[device]
        dimensions = self._model.get_embedding_dimension()
        assert dimensions is not None
        self.dimensions = int(dimensions)
        packed = packed_passes(self._model, self._device, self.max_tokens, model.max_tokens)
        self.packs = packed is not None
        self._vectors = self._padded_vectors
        if packed:
            self._vectors, self.max_tokens = packed.run, packed.max_tokens
        if device == "cuda":
            self.streams = self.most_passes = 2
            self.pass_texts = max(1, self.max_tokens // model.max_tokens)
        kind = "packed" if packed else "padded"
        self.engine = f"torch f16 on a GPU, {kind}" if device == "cuda" else f"torch f32 on {threads} threads, {kind}"

    def run_pass(self, group: Sequence[Ids], *, together: bool) -> Vectors:
        """Run one forward pass, or several smaller ones if a GPU has no memory for it; see the base class."""
        try:
            return self._vectors(group)
        except torch.OutOfMemoryError:
            if len(group) == 1:
                raise
        # Free the memory outside the handler, where the error would keep the tensors of the pass alive.
        torch.cuda.empty_cache()
        half = len(group) // 2
        # Other workers may have the rest of the card, so this one makes smaller passes from now on.
        self.max_tokens = max(MAX_TOKENS, self.max_tokens // 2)
        log.warning("passes_made_smaller", max_tokens=self.max_tokens, detail="the GPU is out of memory")
        return np.concatenate([self.run_pass(part, together=together) for part in (group[:half], group[half:])])

    def _padded_vectors(self, group: Sequence[Ids]) -> Vectors:
        ids, mask = map(torch.from_numpy, padded(group, max(map(len, group)), self._pad_id))
        # Only matrix products have half precision: sums over 512 tokens and norms would lose digits that scores need.
        half = torch.autocast("cuda", torch.float16, enabled=self._device.type == "cuda")
        with torch.inference_mode(), half:
            output = unit_vectors(self._model, ids.to(self._device), mask.to(self._device))
        vectors: Vectors = output.cpu().numpy()
        return vectors


def unit_vectors(model: SentenceTransformer, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return float32 unit vectors of shape (texts, dimensions) for int64 ``ids`` and ``mask`` of shape (texts, width)."""
    transformer, *others = model
    body: Any = model.transformers_model
    features = {"input_ids": ids, "attention_mask": mask}
    # Other models would pass the types of tokens on to layers that do not expect them. A model without types, such as GPT-2,
    # would add the vector of word 0 to every token in place of that of type 0.
    if "token_type_ids" in signature(body.forward).parameters and "token_type_ids" in model.tokenizer.model_input_names:
        features["token_type_ids"] = torch.zeros_like(ids)
    features = transformer(features) | {"attention_mask": mask}
    for module in others:
        features = module(features)
    return torch.nn.functional.normalize(features["sentence_embedding"].float(), dim=1)


def load_model(path: Path, tokenizer: Path, max_tokens: int, device: str) -> SentenceTransformer:
    """Load a model from a local directory, in single precision.

    Raises SettingsError if that fails, if its tokens are not those of the tokenizer's file, if sentence-transformers computes
    other vectors with it, or if it cannot embed a text of ``max_tokens`` tokens.
    """
    transformers.utils.logging.disable_progress_bar()
    length = 0
    try:
        model = SentenceTransformer(str(path), device=device, local_files_only=True).eval()
        # A decoder would keep the keys and values of all tokens, which nobody reads here. OpenVINO cannot trace how
        # transformers 5.24 keeps them.
        body: Any = model.transformers_model
        body.config.use_cache = False
        ids = model.preprocess([_SAMPLE], prompt="")["input_ids"]
        encoded = model.encode([_SAMPLE], prompt="", convert_to_tensor=True, show_progress_bar=False)
        with torch.inference_mode():
            # Normalise in single precision: in the model's own, digits might be lost.
            expected = torch.nn.functional.normalize(encoded.float(), dim=1)
            ids = ids.to(expected.device)
            vectors = unit_vectors(model, ids, torch.ones_like(ids))
            length = min(max_tokens, _LONGEST_CHECKED)
            full = ids[:, :1].repeat(1, length)
            # Copy the result, because a GPU reports a failure only then.
            unit_vectors(model, full, torch.ones_like(full)).cpu()
    except Exception as error:
        problem = "cannot be loaded"
        if "trust_remote_code" in str(error):
            problem = "needs code of its own (trust_remote_code), which is not run here"
        elif length:
            problem = f"cannot embed the {length} tokens that it says it takes: set max_seq_length in sentence_bert_config.json"
        raise SettingsError(f"embedding.model: {path} {problem} ({type(error).__name__})") from error
    if Tokens(tokenizer).rows([_SAMPLE])[0][0] != ids[0].tolist():
        raise SettingsError(f"embedding.model: {tokenizer} makes other tokens than sentence-transformers does")
    if vectors.shape != expected.shape or not torch.allclose(vectors, expected, atol=_TOLERANCE):
        raise SettingsError(
            f"embedding.model: {path} makes other vectors than sentence-transformers does, so it is not supported"
        )
    # All engines must compute with the same weights: in half precision, the vectors would change.
    return model.float()


def packed_passes(model: SentenceTransformer, device: torch.device, max_tokens: int, longest: int) -> PackedPasses | None:
    """Return the packed passes of a model; None if it cannot be packed or its packed vectors differ."""
    ids = model.preprocess([_SAMPLE], prompt="")["input_ids"][0].tolist()
    rows = [(ids * longest)[:length] for length in (len(ids), 1, min(longest, _LONGEST_CHECKED), len(ids) + 1)]
    alone = [torch.tensor([row], device=device) for row in rows]
    with torch.inference_mode():
        expected = torch.cat([unit_vectors(model, row, torch.ones_like(row)) for row in alone]).cpu().numpy()
        try:
            packed = PackedModel(model, torch.float16 if device.type == "cuda" else torch.float32)
            passes = PackedPasses(packed, device, max_tokens, longest, expected.shape[1])
            vectors = passes.run(rows)
        except Exception as error:
            detail = str(error) if isinstance(error, ValueError) else type(error).__name__
            log.info("model_not_packed", detail=detail)
            return None
    if not float((vectors * expected).sum(axis=1).min()) > 1 - _TOLERANCE:
        log.warning("model_not_packed", detail="its vectors would differ from padded ones")
        return None
    return passes
