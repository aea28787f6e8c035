"""The embedder: texts to tokens, tokens to groups, groups through an engine, vectors back in order."""

from collections.abc import Iterator, Sequence

import numpy as np

from worker.embedding.embedder import Vectors
from worker.embedding.engine import Engine
from worker.embedding.model import ModelFiles
from worker.embedding.tokens import Tokens


class TextEmbedder:
    """Embeds texts with a model's tokenizer and an engine."""

    def __init__(self, model: ModelFiles, tokens: Tokens, engine: Engine) -> None:
        """Embed with ``engine``, which runs ``model``."""
        self.name = model.name
        self.space = model.space
        self.engine = engine.name
        self.dimensions = engine.dimensions
        self._tokens = tokens
        self._engine = engine

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        rows = self._tokens.of(texts)
        groups = list(group_by_length([len(row) for row in rows], self._engine.max_tokens, self._engine.step))
        vectors = np.empty((len(rows), self.dimensions), np.float32)
        found = self._engine.run([[rows[index] for index in group] for group in groups])
        for group, part in zip(groups, found, strict=True):
            vectors[group] = part
        return vectors


def group_by_length(lengths: Sequence[int], max_tokens: int, step: int) -> Iterator[list[int]]:
    """Group positions, shortest first, so that little is padded and no group has more than ``max_tokens``, padding included.

    Lengths in a group round up to the same multiple of ``step``. A text that is too long by itself is a group of its own.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        # Rounded up by flooring the negative.
        if group and ((len(group) + 1) * length > max_tokens or -lengths[group[0]] // step != -length // step):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
