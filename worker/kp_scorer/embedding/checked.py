"""An embedder under suspicion: whether it is a text that cannot be embedded, or an embedder that can embed nothing."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from kp_scorer.embedding.embedder import Embedder, Vectors
from kp_scorer.errors import EmbedderSick

_PROBE: Final = "An embedder that is in order embeds this text, whatever else it is given. " * 60
"""More than any model reads of a text, so that it needs all that the longest trace would need."""

_LENGTH_TOLERANCE: Final = 1e-2
_HOPELESS_BATCHES: Final = 3


class CheckedEmbedder:
    """Looks at every vector, and at the embedder itself when a text fails alone. One thread owns it."""

    def __init__(self, embedder: Embedder) -> None:
        """Take an embedder for healthy."""
        self._embedder = embedder
        self._failed_batches = 0
        self._failed_alone = 0
        self._sick = False

    def embed(self, texts: Sequence[str], *, again: bool = False) -> Vectors:
        """Embed texts, in order; ``again`` is one of a batch that failed.

        Whatever the embedder raises, or ``FloatingPointError`` for vectors that are none, is the fault of the texts.

        Raises:
            EmbedderSick: it is no fault of theirs; and from then on always.
        """
        if self._sick:
            raise EmbedderSick("embedder: it embeds nothing any more")
        try:
            vectors = self._sound(texts)
        except Exception as error:
            self._failed_batches += not again
            if len(texts) == 1:
                self._failed_alone += 1
                self._look_for_the_fault(error)
            raise
        self._failed_batches = self._failed_alone = 0
        return vectors

    def _sound(self, texts: Sequence[str]) -> Vectors:
        vectors = self._embedder.embed(texts)
        lengths = np.linalg.norm(vectors, axis=1)
        # Not a number is never within the tolerance.
        if lengths.shape != (len(texts),) or not np.all(np.abs(lengths - 1) <= _LENGTH_TOLERANCE):
            raise FloatingPointError("expected a finite vector of length 1 for each text")
        return vectors

    def _look_for_the_fault(self, error: Exception) -> None:
        """Raise EmbedderSick unless it was the text that failed alone."""
        try:
            self._sound([_PROBE])
        except Exception as probed:
            self._sick = True
            raise EmbedderSick(f"embedder: it cannot even embed a probe ({type(probed).__name__})") from error
        # No batch in a row has had a single text that could be embedded.
        if min(self._failed_batches, self._failed_alone) >= _HOPELESS_BATCHES:
            self._sick = True
            raise EmbedderSick(f"embedder: it embeds nothing but a probe ({type(error).__name__})") from error
