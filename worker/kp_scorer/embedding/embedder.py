"""The embedder's interface, which is all that the rest of the worker uses."""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
"""One vector, of shape (dimensions,)."""

Vectors = NDArray[np.float32]
"""Several vectors, of shape (texts, dimensions)."""

MAX_TOKENS: Final = 512
"""Only this many leading tokens of a text count, special tokens included."""


class Embedder(Protocol):
    """Turns texts into vectors. Not thread-safe: one thread owns it."""

    @property
    def name(self) -> str:
        """Name of the model, for display."""
        ...

    @property
    def engine(self) -> str:
        """What computes the vectors, for display."""
        ...

    @property
    def space(self) -> str:
        """Fingerprint of model, weights, truncation, pooling and text recipe: equal if and only if vectors are comparable.

        The engine is not part of it: the vectors of a text by any two engines have a cosine of at least 1 - 1e-4.
        """
        ...

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        ...
