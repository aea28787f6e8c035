"""The embedder without a model: it counts a text's words into the dimensions of a vector, by a hash.

It recognises equal words, but neither their meaning nor their order. It needs nothing but numpy.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from itertools import islice
from operator import add
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kp_scorer.characters import normalized, without_unseen
from kp_scorer.embedding.embedder import ASKED_AND_DID, Embedder, Vectors

_DIMENSIONS: Final = 384
_MARKS: Final = (  # Marks within words, such as vowels, with the letters among them: ``\w`` alone would split words at marks.
    "\u034f"  # ``normalized`` inserts it into long runs of marks
    "\u07a6-\u07b0\u3099\u309a"  # Thaana, Japanese
    "\u0900-\u0963\u0966-\u0df3\u0f71-\u0fbc"  # India, Sri Lanka, Tibet
)

_OPTIONAL_MARKS: Final = re.compile(  # Marks that people leave out; words are equal without them.
    "[\u0300-\u034e\u0350-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20f0\ufe20-\ufe2f"  # accents
    "\u0591-\u05bd\u05bf-\u05c7\ufb1e"  # Hebrew
    "\u0640"  # the line that stretches Arabic words
    "\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0711\u0730-\u074a\u08d3-\u08ff]"  # Arabic, Syriac
)
_UNSPACED: Final = (  # Letters and marks of scripts that write no spaces between words.
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf"  # Thai, Lao
    "\u1000-\u103f\u1050-\u1089\ua9e0-\ua9ef\uaa60-\uaa7f\u1780-\u17d3"  # Burmese, Khmer
    "\u3005\u3007\u3041-\u3096\u309d-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # Japanese
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese
)

_WORDS: Final = re.compile(rf"[\w{_MARKS}]+")
_ASCII_SPACES: Final = {ord(each): " " for each in map(chr, range(128)) if not _WORDS.match(each)}
_RUNS: Final = re.compile(f"[{_UNSPACED}]+")
_MOST_WORDS: Final = 32_768
"""Only the first different words of a passage count, up to this many: those of more than 200,000 characters of prose.

This bounds the time for a text that consists of different words alone.
"""

_REMEMBERED: Final = 32_768
# The hashes of words up to this length are remembered: this takes 16 MB at most, and saves most of the time.
_REMEMBERED_CHARS: Final = 64


class WordsEmbedder(Embedder):
    """Embeds objective and steps by their words, whatever ``novelty.recipe`` says: one vector for both would blur traces."""

    name = "words"
    engine = "a hash on 1 thread"
    space = f"words-3{ASKED_AND_DID.mark}"
    dimensions = _DIMENSIONS
    recipe = ASKED_AND_DID

    def __init__(self) -> None:
        self._columns = _Columns()

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        return np.array(list(map(self._vector, texts)), np.float32).reshape(len(texts), _DIMENSIONS)

    def _vector(self, text: str) -> NDArray[np.float64]:
        # The weighted sum of a text's passages, of length 1. Passages without words do not count. A text without any words gets
        # the first unit vector.
        summed = np.zeros(_DIMENSIONS)
        for part, passage in zip(self.recipe.parts, self.recipe.passages(text), strict=True):
            counted = self._counted(passage)
            # The length may be 0, because words with opposite signs may cancel out.
            if length := np.linalg.norm(counted):
                summed += part.weight / length * counted
        if length := np.linalg.norm(summed):
            return summed / length
        summed[0] = 1.0
        return summed

    def _counted(self, passage: str) -> NDArray[np.float64]:
        counts = Counter(_words_of(_folded(passage)))
        columns = np.fromiter(map(self._columns.__getitem__, islice(counts, _MOST_WORDS)), np.intp)
        weights = 1.0 + np.log(np.fromiter(islice(counts.values(), _MOST_WORDS), np.float64))
        positive, negative = np.bincount(columns, weights, 2 * _DIMENSIONS).reshape(2, _DIMENSIONS)
        counted: NDArray[np.float64] = np.subtract(positive, negative)
        return counted


class _Columns(dict[str, int]):
    """The column of each word: its dimension, or for a negative sign its dimension plus the number of dimensions."""

    def __missing__(self, word: str) -> int:
        # Python's own hash would differ between processes.
        hashed = int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "little")
        column = (hashed >> 1) % _DIMENSIONS + (hashed & 1) * _DIMENSIONS
        if len(word) <= _REMEMBERED_CHARS:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[word] = column
        return column


def _folded(text: str) -> str:
    """Return a text without case and optional marks, in one normal form, so that the variants of a word become equal."""
    if not text.isascii():
        text = normalized("NFKD", without_unseen(text))
        text = unicodedata.normalize("NFC", _OPTIONAL_MARKS.sub("", text))
    return text.casefold()


def _words_of(text: str) -> list[str]:
    """Return the words of a text and, for each run in a script without spaces, the pairs of neighbours; in any order."""
    if text.isascii():
        # This gives the same words in half the time.
        return text.translate(_ASCII_SPACES).split()
    pairs: list[str] = []
    if runs := _RUNS.findall(text):
        for run in runs:
            pairs += map(add, run, run[1:]) if len(run) > 1 else [run]
        text = _RUNS.sub(" ", text)
    return _WORDS.findall(text) + pairs
