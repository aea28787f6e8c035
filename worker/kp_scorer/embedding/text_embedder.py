"""The embedder: texts to their first tokens, tokens to groups, groups through an engine, vectors back in order."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from kp_scorer.embedding.embedder import MAX_TOKENS, Embedder, Engine, Ids, Recipe, TokenizedText, Vectors, rounded_up
from kp_scorer.embedding.model import ModelFiles
from kp_scorer.embedding.units import Units, is_splittable
from kp_scorer.errors import SettingsError

_MOST_CHARS_PER_TOKEN: Final = 16
"""Of texts for another tokenizer than BERT's so many characters are read for each token; prose has five."""


class Row(NamedTuple):
    """What is embedded of a text."""

    ids: Ids
    is_whole: bool  # Whether that is all of it.


class Tokens:
    """A model's tokenizer, truncated to the longest text that the model takes.

    The reference cuts after the special tokens are added: a text that is too long keeps its first 512 ids and loses the
    closing [SEP]. Letting the tokenizer truncate, as sentence-transformers does, would keep [SEP] in place of the 512th token
    and move scores by up to 0.0025.
    """

    def __init__(self, path: Path, longest: int = MAX_TOKENS, prompt: str = "", *, keeps_closing: bool = False) -> None:
        """Read a ``tokenizer.json``, or raise SettingsError if it holds none.

        Unless it is BERT's, only the first 16 characters for each token are tokenised.
        """
        try:
            text = path.read_text("utf-8")
            self._tokenizer = Tokenizer.from_str(text)
            # The file may set truncation and padding; the reference overrides both.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            # A letter shows which special tokens open a text, and which close it.
            letter = self._tokenizer.encode("a")
            start = letter.special_tokens_mask.index(0)
            end = len(letter) - letter.special_tokens_mask[::-1].index(0)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise SettingsError(f"embedding.model: {path} cannot be loaded ({type(error).__name__})") from error
        self._longest = longest
        self._prompt = prompt
        self._keeps_closing = keeps_closing
        self._opening: Ids = letter.ids[:start]
        self._closing: Ids = letter.ids[end:]
        description = json.loads(text)
        self._units = Units(self._tokenizer, description) if is_splittable(description) else None

    def row(self, text: str, most: int | None = None, *, keep_end: bool = False) -> Row:
        """At most ``most`` ids of a text, by default as many as the model takes, exactly as tokenising all of it gives them.

        Prompt and special tokens count. Of a text that is longer, the first of them; to ``keep_end``, as many from its
        beginning as from its end, between the special tokens.
        """
        row = self._both_ends if keep_end else self._beginning
        return row(self._prompt + text, min(most or self._longest, self._longest))

    def _beginning(self, text: str, most: int) -> Row:
        fits = most - len(self._opening) - len(self._closing)
        inner = fits if self._keeps_closing else most - len(self._opening)
        chars = len(text) if self._units else most * _MOST_CHARS_PER_TOKEN
        ids = self._read(self._units, text, fits + 1) if self._units else self._encode(text[:chars])
        is_whole = len(ids) <= fits and len(text) <= chars
        return Row([*self._opening, *ids[:inner], *self._closing][:most], is_whole)

    def _both_ends(self, text: str, most: int) -> Row:
        half = (most - len(self._opening) - len(self._closing)) // 2
        chars = most * _MOST_CHARS_PER_TOKEN // 2
        if self._units is None:
            ids = end = self._encode(text if len(text) <= 2 * chars else f"{text[:chars]} {text[-chars:]}")
        else:
            ids = self._read(self._units, text, 2 * half + 1)
            end = self._read(self._units, text, half, backwards=True) if len(ids) > 2 * half else ids
        is_whole = len(ids) <= 2 * half and (self._units is not None or len(text) <= 2 * chars)
        if len(ids) > 2 * half:
            ids = ids[:half] + end[-half:]
        return Row([*self._opening, *ids, *self._closing], is_whole)

    def _read(self, units: Units, text: str, least: int, *, backwards: bool = False) -> Ids:
        """The first ids of a text, ``least`` or more, or all of them where it has fewer; or, ``backwards``, its last ones."""
        ids: Ids = []
        for piece in units.pieces(text, least, backwards=backwards):
            ids = self._encode(piece) + ids if backwards else ids + self._encode(piece)
            if len(ids) >= least:
                break
        return ids

    def _encode(self, text: str) -> Ids:
        # Of many at once the tokenizer would hold the offsets of all; this way it makes none.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: Ids = encoding.ids
        return ids


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
