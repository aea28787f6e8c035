"""The embedder: texts to tokens, tokens to groups, groups through an engine, vectors back in order."""

from collections.abc import Iterator, Sequence

import numpy as np

from kp_scorer.embedding.embedder import Embedder, Engine, Recipe, TokenizedText, Vectors, rounded_up
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.tokens import Tokens


class TextEmbedder(Embedder):
    """Embeds texts with a model's tokenizer and an engine, by a recipe."""

    def __init__(self, model: ModelFiles, recipe: Recipe, tokens: Tokens, engine: Engine) -> None:
        """Embed with ``engine``, which runs ``model``, what ``recipe`` makes of traces."""
        self.name = model.name
        self.space = model.space + recipe.mark
        self.engine = engine.name
        self.dimensions = engine.dimensions
        self.recipe = recipe
        self.streams = engine.streams
        self.most_passes = engine.most_passes
        self.max_tokens = engine.max_tokens
        self.step = engine.step
        self._tokens = tokens
        self._engine = engine

    def tokenize(self, text: str) -> TokenizedText:
        """Tokenize each of the recipe's parts."""
        passages = zip(self.recipe.parts, self.recipe.passages(text), strict=True)
        rows = [self._tokens.row(passage, part.max_tokens, keep_end=part.keeps_end) for part, passage in passages]
        return TokenizedText(text, [row.ids for row in rows], all(row.is_whole for row in rows))

    def tokenize_plain(self, text: str) -> TokenizedText:
        """Tokenize as much as the model takes."""
        row = self._tokens.row(text, None, keep_end=False)
        return TokenizedText(text, [row.ids], row.is_whole)

    def run(self, texts: Sequence[TokenizedText], *, together: bool) -> Vectors:
        """Run one forward pass for each part; see the base class."""
        parts = zip(*[each.rows for each in texts], strict=True)
        return self._sum(np.stack([self._engine.run_pass(rows, together=together) for rows in parts]))

    def embed_tokenized(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Embed texts, in order."""
        parts = range(len(texts[0].rows) if texts else 1)
        rows = [each.rows[part] for part in parts for each in texts]
        groups = list(group_by_length([len(row) for row in rows], self.max_tokens, self.step))
        vectors = np.empty((len(rows), self.dimensions), np.float32)
        results = self._engine.run([[rows[index] for index in group] for group in groups])
        for group, result in zip(groups, results, strict=True):
            vectors[group] = result
        return self._sum(vectors.reshape(len(parts), len(texts), self.dimensions))

    def _sum(self, vectors: Vectors) -> Vectors:
        """The vectors of texts, by those of their parts, of shape (parts, texts, dimensions)."""
        if len(vectors) == 1:
            only: Vectors = vectors[0]
            return only
        weights = np.array([part.weight for part in self.recipe.parts], np.float32)
        summed: Vectors = np.tensordot(weights, vectors, 1)
        summed /= np.linalg.norm(summed, axis=1, keepdims=True)
        return summed


def group_by_length(lengths: Sequence[int], max_tokens: int, step: int) -> Iterator[list[int]]:
    """Group the indices of ``lengths``, shortest first, so that little is padded.

    No group has more than ``max_tokens``, if all were as long as its longest, and lengths in one round up to the same ``step``.
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
