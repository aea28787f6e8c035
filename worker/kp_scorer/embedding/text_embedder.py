"""The embedder: texts to tokens, tokens to groups, groups through an engine, vectors back in order."""

from collections.abc import Iterator, Sequence

import numpy as np

from kp_scorer.embedding.embedder import Engine, Ids, Recipe, Vectors, rounded_up
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.tokens import Tokens


class TextEmbedder:
    """Embeds texts with a model's tokenizer and an engine, by a recipe."""

    def __init__(self, model: ModelFiles, recipe: Recipe, tokens: Tokens, engine: Engine) -> None:
        """Embed with ``engine``, which runs ``model``, what ``recipe`` makes of traces."""
        self.name = model.name
        self.space = model.space + recipe.mark
        self.engine = engine.name
        self.dimensions = engine.dimensions
        self.recipe = recipe
        self.tokens_embedded = 0
        self._tokens = tokens
        self._engine = engine

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        parts = self.recipe.parts
        passages = [self.recipe.passages(text) for text in texts]
        rows = [
            row
            for index, part in enumerate(parts)
            for row in self._tokens.of([each[index] for each in passages], part.max_tokens, keep_end=part.keeps_end)
        ]
        vectors = self._run(rows)
        if len(parts) == 1:
            return vectors
        weights = np.array([part.weight for part in parts], np.float32)
        summed: Vectors = np.tensordot(weights, vectors.reshape(len(parts), len(texts), self.dimensions), 1)
        summed /= np.linalg.norm(summed, axis=1, keepdims=True)
        return summed

    def _run(self, rows: Sequence[Ids]) -> Vectors:
        self.tokens_embedded += sum(map(len, rows))
        groups = list(group_by_length([len(row) for row in rows], self._engine.max_tokens, self._engine.step))
        vectors = np.empty((len(rows), self.dimensions), np.float32)
        results = self._engine.run([[rows[index] for index in group] for group in groups])
        for group, part in zip(groups, results, strict=True):
            vectors[group] = part
        return vectors


def group_by_length(lengths: Sequence[int], max_tokens: int, step: int) -> Iterator[list[int]]:
    """Group the indices of ``lengths``, shortest first, so that little is padded.

    No group has more than ``max_tokens``, padding included, and lengths in a group round up to the same multiple of ``step``.
    A text longer than ``max_tokens`` is a group of its own.
    """
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[index]
        is_full = (len(group) + 1) * length > max_tokens
        if group and (is_full or rounded_up(lengths[group[0]], step) != rounded_up(length, step)):
            yield group
            group = []
        group.append(index)
    if group:
        yield group
