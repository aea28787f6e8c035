"""Implements the vector cache of KnowledgePulse's SDK: vectors in memory that a new one is compared with."""

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = Sequence[float] | NDArray[np.float32]


class VectorCache:
    """The newest ``max_elements`` vectors of ``dimensions`` numbers, each for ``ttl_ms``, as in the reference SDK.

    It belongs to one process, and one thread at a time. Workers share a log in Redis instead.
    """

    def __init__(self, max_elements: int = 1_000, dimensions: int = 384, ttl_ms: float = 86_400_000) -> None:
        """Raise ValueError if a limit is not positive."""
        if min(max_elements, dimensions, ttl_ms) <= 0:
            raise ValueError("max_elements, dimensions, ttl_ms: expected more than 0")
        self.max_elements, self.dimensions, self.ttl_ms = max_elements, dimensions, ttl_ms
        self._vectors = np.zeros((max_elements, dimensions), np.float32)
        self._added_ms = np.full(max_elements, -np.inf)
        self._next = 0

    @property
    def size(self) -> int:
        """The number of vectors that have not expired."""
        return int(np.count_nonzero(self._are_young()))

    def add(self, vector: Vector) -> None:
        """Add a vector, in place of the oldest one if the cache is full. Raise ValueError if its dimensions are wrong."""
        self._vectors[self._next] = self._unit(vector)
        self._added_ms[self._next] = time.monotonic() * 1_000
        self._next = (self._next + 1) % self.max_elements

    def max_cosine_similarity(self, vector: Vector) -> float:
        """Return the largest similarity to a vector in the cache, -1 to 1; 0 if it is empty, or the vector is zero."""
        similarities = self._vectors[self._are_young()] @ self._unit(vector)
        return float(similarities.max(initial=-1.0)) if similarities.size else 0.0

    def clear(self) -> None:
        """Remove all vectors."""
        self._added_ms.fill(-np.inf)

    def _are_young(self) -> NDArray[np.bool_]:
        return self._added_ms > time.monotonic() * 1_000 - self.ttl_ms

    def _unit(self, vector: Vector) -> NDArray[np.float32]:
        values = np.asarray(vector, np.float64)
        if values.shape != (self.dimensions,) or not np.isfinite(values).all():
            raise ValueError(f"expected a vector of {self.dimensions} finite numbers")
        return (values / (np.linalg.norm(values) or 1.0)).astype(np.float32)
