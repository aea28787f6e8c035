"""A worker like ``kp-scorer worker`` in everything but its embedder, for tests that start and kill many of them.

Words are hashed into a vector, so equal texts are equal and similar texts similar; there is no model to load. ``EMBED_S`` is
how long a batch takes to embed, ``PASS_TEXTS`` how many texts fill a pass. ``FAILURE`` makes the embedder unhealthy, from its
call number ``FAILS_FROM`` on:

    panics      an error that is not an Exception, as of a native library
    fails       an error for whatever it gets
    no numbers  vectors without a finite number
    picky       an error for every text that is no longer than a short trace's
"""

import hashlib
import os
import time
import warnings
from collections.abc import Sequence
from typing import Final

import numpy as np
from celery.platforms import SecurityWarning
from kp_scorer.app import create_app
from kp_scorer.embedding.embedder import RECIPES, Embedder, Vectors
from kp_scorer.process.startup import LoadEmbedder
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import EmbeddingSettings, RecipeName

from tests.support.constants import set_constants

_DIMENSIONS: Final = 128
_SHORT_CHARS: Final = 2_000


class Panic(BaseException):
    """An error like those of native libraries that panic, such as pyo3's PanicException."""


class WordHashEmbedder(Embedder):
    name = "word-hash"
    space = "word-hash-1"
    dimensions = _DIMENSIONS

    def __init__(self, settings: EmbeddingSettings, recipe: RecipeName) -> None:
        self.recipe = RECIPES[recipe]
        self.pass_texts = int(os.environ.get("PASS_TEXTS", "0"))
        self._healthy_calls = int(os.environ.get("FAILS_FROM", "1")) - 1

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Embed texts as float32 unit vectors of shape (len(texts), 128)."""
        time.sleep(float(os.environ.get("EMBED_S", "0")))
        self._healthy_calls -= 1
        match os.environ.get("FAILURE") if self._healthy_calls < 0 else None:
            case "panics":
                raise Panic(f"called unwrap on {texts}")
            case "fails":
                raise RuntimeError(f"out of order at {texts}")
            case "no numbers":
                return np.full((len(texts), _DIMENSIONS), np.nan, np.float32)
            case "picky" if min(map(len, texts)) < _SHORT_CHARS:
                raise RuntimeError(f"out of order at {texts}")
        vectors = np.full((len(texts), _DIMENSIONS), 1e-3, np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.split():
                row[hashlib.blake2b(word.encode(), digest_size=1).digest()[0] % _DIMENSIONS] += 1.0
        unit: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit


def run(load_embedder: LoadEmbedder = WordHashEmbedder) -> None:
    warnings.filterwarnings("ignore", category=SecurityWarning)
    set_constants()
    app = create_app(load_settings(), load_embedder)
    app.worker_main(["--quiet", "worker", "--hostname", f"fast-{os.getpid()}@%h"])


if __name__ == "__main__":
    run()
