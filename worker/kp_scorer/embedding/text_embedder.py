"""The embedder with a model: it tokenizes texts, groups them into passes, and puts the passes' vectors back in order."""

from collections.abc import Iterator, Sequence

import numpy as np

from kp_scorer.embedding.embedder import TRACE, Embedder, Ids, Recipe, TokenizedText, Vectors, rounded_up
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.tokenizer import Tokens


class TextEmbedder(Embedder):
    """Embeds texts with a model's tokenizer, by a recipe; its subclasses are the engines, which run the model."""

    has_threads = True

    def __init__(self, model: ModelFiles, recipe: Recipe) -> None:
        """Embed traces by ``model`` and ``recipe``; raise SettingsError if the model's tokenizer cannot be read."""
        self.name = model.name
        self.space = model.space + recipe.mark
        self.recipe = recipe
        self._tokens = Tokens(model.tokenizer, model.max_tokens, model.prompt, keeps_closing=model.keeps_closing)

    def run_pass(self, group: Sequence[Ids], *, together: bool) -> Vectors:
        """Run a forward pass over these rows, as :meth:`Embedder.run` does."""
        raise NotImplementedError

    def run_passes(self, groups: Sequence[Sequence[Ids]]) -> list[Vectors]:
        """Run a forward pass for each group of rows and return its vectors.

        Unless the embedder packs texts, the groups come in order of length, shortest first.
        """
        return [self.run_pass(group, together=True) for group in groups]

    def tokenize_all(self, texts: Sequence[str], *, plain: bool = False) -> list[TokenizedText]:
        """Tokenize the parts of texts that the recipe names, or ``plain`` texts as far as the model accepts them."""
        recipe = TRACE if plain else self.recipe
        passages = [recipe.passages(text) for text in texts]
        parts = [
            self._tokens.rows([each[index] for each in passages], part.max_tokens, keep_end=part.keeps_end)
            for index, part in enumerate(recipe.parts)
        ]
        return [self._tokenized(text, rows) for text, *rows in zip(texts, *parts, strict=True)]

    def _tokenized(self, text: str, rows: Sequence[tuple[Ids, bool]]) -> TokenizedText:
        unknown = sum(ids.count(self._tokens.unknown_id) for ids, _ in rows)
        return TokenizedText(text, [ids for ids, _ in rows], all(is_whole for _, is_whole in rows), unknown)

    def run(self, texts: Sequence[TokenizedText], *, together: bool) -> Vectors:
        """Run one forward pass for each part; see the base class."""
        parts = zip(*[each.rows for each in texts], strict=True)
        return self._sum(np.stack([self.run_pass(rows, together=together) for rows in parts]))

    def embed_tokenized(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Embed tokenized texts, in order."""
        parts = range(len(texts[0].rows) if texts else 1)
        rows = [each.rows[part] for part in parts for each in texts]
        lengths = [len(row) for row in rows]
        groups = list(
            group_by_tokens(lengths, self.max_tokens) if self.packs else group_by_length(lengths, self.max_tokens, self.step)
        )
        vectors = np.empty((len(rows), self.dimensions), np.float32)
        results = self.run_passes([[rows[index] for index in group] for group in groups])
        for group, result in zip(groups, results, strict=True):
            vectors[group] = result
        return self._sum(vectors.reshape(len(parts), len(texts), self.dimensions))

    def _sum(self, vectors: Vectors) -> Vectors:
        """Combine the parts' vectors, of shape (parts, texts, dimensions), into vectors of shape (texts, dimensions)."""
        if len(vectors) == 1:
            only: Vectors = vectors[0]
            return only
        weights = np.array([part.weight for part in self.recipe.parts], np.float32)
        summed: Vectors = np.tensordot(weights, vectors, 1)
        summed /= np.linalg.norm(summed, axis=1, keepdims=True)
        return summed


def group_by_tokens(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Group the indices of ``lengths`` in order; a group has at most ``max_tokens``, unless it is one longer text."""
    group: list[int] = []
    for index, length in enumerate(lengths):
        if group and sum(lengths[group[0] : index]) + length > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def group_by_length(lengths: Sequence[int], max_tokens: int, step: int) -> Iterator[list[int]]:
    """Group the indices of ``lengths``, shortest first, so that little is padded.

    A group has at most ``max_tokens``, counting each text as long as the longest, and its lengths round up to the same
    ``step``. A text longer than ``max_tokens`` is a group of its own.
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
