"""A worker like ``kp-scorer worker`` in everything but its embedder, for tests that start and kill many of them.

Words are hashed into a vector, so equal texts are equal and similar texts similar; there is no model to load.
"""

import hashlib
import os
import warnings
from collections.abc import Sequence

import numpy as np
from celery.platforms import SecurityWarning
from kp_scorer.app import create_app
from kp_scorer.embedding import RECIPES
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.process.runtime import LoadEmbedder
from kp_scorer.settings import EmbeddingSettings, RecipeName, load_settings

_DIMENSIONS = 128


class WordHashEmbedder:
    """Bags of hashed words as unit vectors."""

    name = "word-hash"
    engine = "python"
    space = "word-hash-1"
    dimensions = _DIMENSIONS
    tokens_embedded = 0

    def __init__(self, settings: EmbeddingSettings, recipe: RecipeName) -> None:
        """Needs nothing but the recipe; takes the settings that every embedder is made from."""
        self.recipe = RECIPES[recipe]

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts as float32 unit vectors of shape (len(texts), 128)."""
        vectors = np.full((len(texts), _DIMENSIONS), 1e-3, np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.split():
                row[hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % _DIMENSIONS] += 1.0
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def run(load_embedder: LoadEmbedder = WordHashEmbedder, *flags: str) -> None:
    """Run the worker, with more flags of Celery's, until it is told to stop."""
    warnings.filterwarnings("ignore", category=SecurityWarning)
    app = create_app(load_settings(), load_embedder)
    app.worker_main(["--quiet", "worker", "--hostname", f"fast-{os.getpid()}@%h", *flags])


if __name__ == "__main__":
    run()
