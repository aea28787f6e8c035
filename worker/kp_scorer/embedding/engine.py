"""The engine's interface: the model's arithmetic, from token ids to vectors."""

from collections.abc import Sequence
from typing import Protocol

from kp_scorer.embedding.embedder import Vectors

Ids = list[int]
"""Token ids of one text, special tokens included."""


def rounded_up(length: int, step: int) -> int:
    """``length`` rounded up to a multiple of ``step``."""
    return -(-length // step) * step


class Engine(Protocol):
    """Runs the model. Not thread-safe."""

    @property
    def name(self) -> str:
        """Library, precision and device or threads, for display."""
        ...

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens in a forward pass, padding included; a single longer text gets a pass of its own."""
        ...

    @property
    def step(self) -> int:
        """Texts share a forward pass only if their lengths round up to the same multiple of this."""
        ...

    def run(self, groups: Sequence[Sequence[Ids]]) -> list[Vectors]:
        """Run a forward pass for each group of texts; groups come in order of length, shortest first.

        Returns:
            For each group float32 unit vectors of shape (len(group), dimensions).
        """
        ...


class EngineUnavailable(Exception):
    """An engine cannot run here; the message says why."""
