"""What an engine is: the model's arithmetic, from token ids to vectors."""

from collections.abc import Sequence
from typing import Protocol

from worker.embedding.embedder import Vectors

Ids = list[int]
"""Token ids of one text, special tokens included."""


class Engine(Protocol):
    """Runs the model. Not thread-safe."""

    @property
    def name(self) -> str:
        """What it is, with what precision and where it computes, for people."""
        ...

    @property
    def dimensions(self) -> int:
        """Length of a vector."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of one forward pass, padding included, unless a single text has more."""
        ...

    @property
    def step(self) -> int:
        """Texts share a forward pass only if their lengths round up to the same multiple of this."""
        ...

    def run(self, groups: Sequence[Sequence[Ids]]) -> list[Vectors]:
        """Run a forward pass for each group of texts, those of the shortest texts first.

        Returns:
            For each group float32 unit vectors of shape (len(group), dimensions).
        """
        ...


class EngineUnavailable(Exception):
    """An engine cannot run here; the message says why."""
