"""The embedder on sentence-transformers and torch, on CPU."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

# No model is ever fetched at run time; read by transformers and the hub client when they are imported.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from worker.embedding.embedder import MAX_TOKENS, Vectors
from worker.errors import SettingsError

_BATCH_TOKENS: Final = 4096
"""Tokens of one forward pass, padding included: 8 full texts or a hundred short ones."""

_RECIPE: Final = "objective+contents/first-512-tokens/1"
"""Names what text is embedded and how it is cut; change it when either changes, so that vectors of two recipes never meet."""


class SentenceTransformersEmbedder:
    """Embeds with a sentence-transformers model read from a local directory."""

    def __init__(self, model_path: Path, name: str, *, threads: int = 0) -> None:
        """Load the model; ``threads`` bounds torch's intra-op threads (0 leaves torch's own choice).

        Raises:
            SettingsError: the directory holds no model that sentence-transformers can load.
        """
        if threads:
            torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        try:
            self._model = SentenceTransformer(str(model_path), device="cpu", local_files_only=True)
            tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        except Exception as error:
            raise SettingsError(f"embedding.model: {model_path} cannot be loaded ({type(error).__name__})") from error
        # The file carries a fixed truncation and padding of 128 tokens. The reference overrides both, and cuts after the
        # special tokens are added: a long text keeps its first 512 ids and loses the closing [SEP]. Letting the tokenizer
        # truncate would keep [SEP] in place of the 512th token and move scores by up to 0.0025.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._pad_id = int(self._model.tokenizer.pad_token_id)
        self.name = name
        dimensions = self._model.get_embedding_dimension()
        assert dimensions is not None
        self.dimensions = int(dimensions)
        self.space = f"{name}-{_fingerprint(model_path)}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        ids = [encoding.ids[:MAX_TOKENS] for encoding in self._tokenizer.encode_batch(list(texts))]
        vectors = np.empty((len(texts), self.dimensions), np.float32)
        for batch in _batches([len(row) for row in ids]):
            vectors[batch] = self._forward([ids[index] for index in batch])
        return vectors

    def _forward(self, rows: Sequence[Sequence[int]]) -> Vectors:
        shape = (len(rows), max(map(len, rows)))
        ids = torch.full(shape, self._pad_id, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        features = {"input_ids": ids, "attention_mask": mask, "token_type_ids": torch.zeros(shape, dtype=torch.long)}
        with torch.inference_mode():
            output: torch.Tensor = self._model.forward(features)["sentence_embedding"]
            vectors: Vectors = torch.nn.functional.normalize(output.float(), dim=1).numpy()
        return vectors


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group positions by length, shortest first, so that little is padded and no group exceeds the token budget."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > _BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _fingerprint(model_path: Path) -> str:
    """Digest of all that decides which vector a text gets: weights, tokenizer, pooling and our own text recipe."""
    digest = hashlib.blake2b(_RECIPE.encode(), digest_size=6)
    for pattern in ("*.safetensors", "tokenizer.json", "modules.json", "*_Pooling/config.json"):
        for file in sorted(model_path.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()
