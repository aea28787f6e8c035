"""The fast worker in little memory, whose tasks monitors can watch: what takes more fails, or ends it."""

import resource
import time
from collections.abc import Sequence
from typing import Final

from kp_scorer.embedding.embedder import Vectors

from tests.support.fast_worker import WordHashEmbedder, run

MEMORY_BYTES: Final = 2**30

_EMBED_S: Final = 0.01


class UnhurriedEmbedder(WordHashEmbedder):
    """One that takes a moment, so that there is something in hand to be looked at."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts as float32 unit vectors of shape (len(texts), 128)."""
        time.sleep(_EMBED_S)
        return super().embed(texts)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    run(UnhurriedEmbedder, "--task-events")
