"""What the rest of the worker knows of an embedder."""

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]

MAX_TOKENS: Final = 512
"""Only so many leading tokens of a text count, special tokens included."""


class Embedder(Protocol):
    """Turns texts into vectors. Not thread-safe: one thread owns it."""

    @property
    def name(self) -> str:
        """Name of the model, for people."""
        ...

    @property
    def engine(self) -> str:
        """What computes the vectors, for people."""
        ...

    @property
    def space(self) -> str:
        """Fingerprint of model, weights, truncation, pooling and text recipe: equal if and only if vectors are comparable.

        The engine is not part of it: all engines give the same vectors, to within a cosine of 1e-4.
        """
        ...

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        ...
