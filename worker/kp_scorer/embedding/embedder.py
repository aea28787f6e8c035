"""The embedder's interface, which is all that the rest of the worker uses."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kp_scorer.embedding.recipe import Recipe

Vector = NDArray[np.float32]
"""One vector, of shape (dimensions,)."""

Vectors = NDArray[np.float32]
"""Several vectors, of shape (texts, dimensions)."""


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

    @property
    def recipe(self) -> Recipe:
        """Makes of traces the texts that are to be embedded."""
        ...

    @property
    def tokens_embedded(self) -> int:
        """How many tokens it was given by now, without what pads them; 0 for ever if it has none."""
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts, in order, as float32 unit vectors of shape (len(texts), dimensions)."""
        ...
