"""An embedder small enough to reason about."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from kp_scorer.embedding.embedder import TRACE, Embedder, Vectors


class WordEmbedder(Embedder):
    """Each dimension is the sign of a vote by the words' hashes, so that every similarity is exact in float32."""

    name = "words"
    space = "words-1"
    dimensions = 64
    recipe = TRACE

    def __init__(self) -> None:
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.texts.extend(texts)
        votes = np.array([sum((self._vote(word) for word in text.split()), start=np.zeros(64)) for text in texts])
        return np.where(votes >= 0, 0.125, -0.125).astype(np.float32)

    @staticmethod
    def _vote(word: str) -> Any:
        bits = np.frombuffer(hashlib.blake2b(word.encode(), digest_size=8).digest(), np.uint8)
        return np.unpackbits(bits) * 2.0 - 1.0
