"""Embedders and engines: their interface, the text that a trace becomes, and the check that an embedder still works."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.errors import EmbedderUnhealthy
from kp_scorer.settings.sections import RecipeName
from kp_scorer.trace import ReasoningTrace

Vector = NDArray[np.float32]  # One vector, of shape (dimensions,).
Vectors = NDArray[np.float32]  # Several vectors, of shape (texts, dimensions).
Int64s = NDArray[np.int64]
Ids = list[int]  # Token ids of one text, special tokens included.

MAX_TOKENS: Final = 512  # The default model reads this many tokens of a text, special ones included.
_SEPARATOR: Final = "\x1e"  # Separates the passages of a text: ASCII's record separator, which BERT's normalizer drops.
_PROBE: Final = "A healthy embedder embeds this text, whatever else it is given. " * 60
"""A text longer than most models read, so that it takes as much memory and time as the longest trace."""

_WORD: Final = re.compile(r"[\[<{(]{1,2}(?:[A-Z][A-Z0-9_ :-]{0,62}|(?i:redacted))[\]>})]{1,2}|([^\W_])")
"""Matches a stand-in for a text, such as ``[REDACTED]``; or a character of a word, which is then group 1."""

_LENGTH_TOLERANCE: Final = 0.01
_HOPELESS_TEXTS: Final = 8  # After this many texts in a row have failed alone, the embedder counts as unhealthy.


class Part(NamedTuple):
    """One passage of a text."""

    max_tokens: int | None  # Special tokens included; None for as many as the model accepts.
    keeps_end: bool  # True if a longer passage is read from both ends, half of the tokens each; False if only its beginning is.
    weight: float  # The weight of the part's unit vector in the sum that, normalised, is the text's vector.


class Recipe(NamedTuple):
    """Determines the text of a trace to embed, how much of each part is read, and how the parts' vectors become one."""

    mark: str  # Ends the space's name. Change it whenever vectors change, so that vectors of two recipes never meet.
    parts: tuple[Part, ...]
    text: Callable[[ReasoningTrace], str]

    def passages(self, text: str) -> list[str]:
        """Return the passages of a text, one for each part; a missing one is empty."""
        passages = text.split(_SEPARATOR, len(self.parts) - 1)
        return passages + [""] * (len(self.parts) - len(passages))


TRACE: Final = Recipe("", (Part(None, False, 1.0),), lambda trace: trace.embedding_text)  # The reference's recipe.
ASKED_AND_DID: Final = Recipe(
    ".asked_and_did.1",
    (Part(96, True, 0.6), Part(256, True, 0.4)),
    lambda trace: trace.task.objective.replace(_SEPARATOR, "") + _SEPARATOR + trace.actions_text,
)
RECIPES: Final[Mapping[RecipeName, Recipe]] = MappingProxyType({"trace": TRACE, "asked_and_did": ASKED_AND_DID})


class Counts(NamedTuple):
    """The numbers of a text's tokens, named as the fields of a decision are."""

    embedded_tokens: int | None = None
    text_tokens: int | None = None  # None if the text has more than are embedded, as the rest is not read.
    unknown_tokens: int | None = None
    has_words: bool = True


class TokenizedText(NamedTuple):
    """A text, ready for a pass through the engine."""

    text: str
    rows: Sequence[Ids]  # The token ids of each of the recipe's parts; empty if the embedder has no tokenizer.
    is_whole: bool = True  # False if the text has more tokens than the rows.
    unknown: int = 0  # The number of tokens that stand for a word that the model does not know.

    @property
    def tokens(self) -> int:
        """The number of tokens that are embedded."""
        return sum(map(len, self.rows))

    @property
    def counts(self) -> Counts:
        """The numbers of tokens for a decision."""
        embedded = self.tokens or None
        has_words = any(found[1] for found in _WORD.finditer(self.text))
        return Counts(embedded, embedded if self.is_whole else None, self.unknown if embedded else None, has_words)


class Embedder:
    """Turns texts into vectors; any thread may tokenize. An embedder without tokenizer and engine needs only ``embed``."""

    name: str
    engine = "python"  # The engine that computes the vectors; like the name, it is for display.
    space: str
    """Fingerprint of model, weights, truncation, pooling and text recipe: equal if and only if vectors are comparable.

    The engine is not part of it: the vectors of a text by any two engines have a cosine of at least 1 - 1e-4.
    """
    dimensions: int
    recipe: Recipe
    has_threads = False  # True if the engine has threads. A fork does not copy them, so a forked process cannot embed.
    streams = 1  # The number of passes that run at once.
    # The number of threads that may call ``run`` at once; passes that do not run wait for a stream inside the engine.
    most_passes = 1
    pass_texts = 0  # The number of traces to look up together so that passes are full; 0 if any number will do.
    max_tokens = 0  # The most tokens of a pass, padding included; a longer text gets a pass of its own.
    packs = False  # True if texts of any lengths share a pass. Otherwise each is padded to the longest.
    step = 1  # Padded texts share a pass only if the lengths of their parts round up to the same multiples of this.

    def tokenize_all(self, texts: Sequence[str], *, plain: bool = False) -> list[TokenizedText]:
        """Prepare texts for passes, on all cores.

        ``plain`` texts are not those of traces: each is tokenized as one part, and shares no pass with traces.
        """
        return [TokenizedText(text, ()) for text in texts]

    def run(self, texts: Sequence[TokenizedText], *, together: bool) -> Vectors:
        """Run one pass, ``together`` on all cores; return float32 unit vectors of shape (len(texts), dimensions)."""
        return self.embed_tokenized(texts)

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Tokenize texts, and embed them as :meth:`embed_tokenized` does."""
        return self.embed_tokenized(self.tokenize_all(texts))

    def embed_tokenized(self, texts: Sequence[TokenizedText]) -> Vectors:
        """Embed tokenized texts, as many passes at once as there are streams; return vectors as :meth:`run` does, in order."""
        return self.embed([each.text for each in texts])


def rounded_up(length: int, step: int) -> int:
    """Round ``length`` up to a multiple of ``step``."""
    return -(-length // step) * step


def padded(group: Sequence[Ids], width: int, pad_id: int = 0) -> tuple[Int64s, Int64s]:
    """Return the ids of a group and its mask, which is 1 for each id and 0 for padding, both of shape (texts, width)."""
    ids = np.full((len(group), width), pad_id, np.int64)
    mask = np.zeros((len(group), width), np.int64)
    for index, row in enumerate(group):
        ids[index, : len(row)] = row
        mask[index, : len(row)] = 1
    return ids, mask


class CheckedEmbedder:
    """Checks every vector, and the embedder itself after a text has failed alone.

    Threads may share it if they may share the embedder.
    """

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._pid = os.getpid()
        self._failed_alone = 0
        self._is_unhealthy = False

    def tokenize_all(self, texts: Sequence[str], *, alone: bool, plain: bool = False) -> list[TokenizedText]:
        """Prepare texts for a pass, ``plain`` ones or those of traces; see :meth:`run`."""
        with self._checking(alone=alone):
            return self._embedder.tokenize_all(texts, plain=plain)

    def run(self, texts: Sequence[TokenizedText], *, together: bool, alone: bool) -> Vectors:
        """Run one pass; ``alone`` if it is of a text that failed before, and no other pass runs.

        Raises EmbedderUnhealthy if the embedder is at fault, and from then on always. Any other error, such as
        ``FloatingPointError`` for invalid vectors, is the fault of the texts.
        """
        with self._checking(alone=alone):
            vectors = _valid(self._embedder.run(texts, together=together), len(texts))
        self._failed_alone = 0
        return vectors

    def embed(self, texts: Sequence[TokenizedText], *, alone: bool = False) -> Vectors:
        """Embed texts, in order; see :meth:`run`."""
        with self._checking(alone=alone):
            vectors = _valid(self._embedder.embed_tokenized(texts), len(texts))
        self._failed_alone = 0
        return vectors

    def check_process(self) -> None:
        """Raise EmbedderUnhealthy if the embedder has threads and this process was forked after it was loaded."""
        if self._embedder.has_threads and self._pid != os.getpid():
            # A pass would wait forever for threads that the fork does not copy.
            raise EmbedderUnhealthy(
                "embedder: it was loaded before this process was forked: make a Scorer or KeptRuns in each process"
            )

    @contextmanager
    def _checking(self, *, alone: bool) -> Iterator[None]:
        if self._is_unhealthy:
            raise EmbedderUnhealthy("embedder: it embeds nothing any more")
        self.check_process()
        try:
            yield
        except Exception as error:
            # Probe only then: beside other passes, the probe might fail for lack of memory.
            if alone:
                self._probe(error)
            raise

    def _probe(self, error: Exception) -> None:
        try:
            _valid(self._embedder.embed([_PROBE]), 1)
        except Exception as probed:
            self._is_unhealthy = True
            raise EmbedderUnhealthy(f"embedder: it cannot even embed a probe ({type(probed).__name__})") from error
        self._failed_alone += 1
        if self._failed_alone >= _HOPELESS_TEXTS:
            self._is_unhealthy = True
            raise EmbedderUnhealthy(f"embedder: it embeds nothing but a probe ({type(error).__name__})") from error


def _valid(vectors: Vectors, count: int) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1)
    # Compare in this way to refuse NaN, with which every comparison is false.
    if lengths.shape != (count,) or not np.all(np.abs(lengths - 1) <= _LENGTH_TOLERANCE):
        raise FloatingPointError("expected a finite vector of length 1 for each text")
    return vectors
