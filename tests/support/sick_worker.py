"""A worker whose embedder is ill: ``SICKNESS`` names what it has, from the embedding with number ``SICK_FROM`` on.

    panics      an error that is no Exception, as of a native library
    fails       an error for whatever it is given
    no numbers  vectors without a finite number
    picky       an error for every text that is no longer than a short trace's

Without it the worker is a healthy one, which takes ``EMBED_S`` seconds for a batch.
"""

import os
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.settings import EmbeddingSettings, RecipeName

from tests.support.fast_worker import WordHashEmbedder, run

SICK_WORKER: Final = ("tests.support.sick_worker",)

_SHORT: Final = 2_000


class Panic(BaseException):
    """What a native library may raise; pyo3's is called PanicException."""


class SickEmbedder(WordHashEmbedder):
    """Hashed words, until it falls ill."""

    def __init__(self, settings: EmbeddingSettings, recipe: RecipeName) -> None:
        super().__init__(settings, recipe)
        self._healthy = int(os.environ.get("SICK_FROM", "1")) - 1

    def embed(self, texts: Sequence[str]) -> Vectors:
        self._healthy -= 1
        time.sleep(float(os.environ.get("EMBED_S", "0")))
        match os.environ.get("SICKNESS") if self._healthy < 0 else None:
            case "panics":
                raise Panic(f"called unwrap on {texts}")
            case "fails":
                raise RuntimeError(f"out of order at {texts}")
            case "no numbers":
                return np.full((len(texts), self.dimensions), np.nan, np.float32)
            case "picky" if min(map(len, texts)) < _SHORT:
                raise RuntimeError(f"out of order at {texts}")
        return super().embed(texts)


if __name__ == "__main__":
    run(SickEmbedder)
