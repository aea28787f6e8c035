"""Our engine beside the reference SDK's, in one run and on the same texts.

The reference is transformers.js from npm: the same weights as ONNX, float32, one text at a time, all cores. Ours embeds
batches as a worker makes them. The two take turns batch by batch, so that a machine that slows down for a minute slows both,
and every text was embedded by both once before anything is measured. Needs node, npm and ``kp-scorer[embedding,benchmark]``.

- ``reference_traces_per_s``, ``traces_per_s``: medians of the passes over the texts; tokens in, vectors out.
- ``ratio``: the median of the passes' ratios, and the smallest and the largest of them.
- ``cosine_min``: the smallest cosine between the two vectors of a text.
"""

import argparse
import time
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from kp_scorer.embedding import Embedder
from kp_scorer.settings import WorkerSettings

from tests.benchmarks.common import Row, Texts, batches, emit, real_embedder, say, show_table, texts_of_every_length
from tests.benchmarks.reference_engine import ReferenceEngine, reference_engine

_BATCH: Final = WorkerSettings().batch_size

_COLUMNS: Final = {
    "texts": "texts",
    "tokens": "tokens",
    "reference_traces_per_s": "reference/s",
    "traces_per_s": "ours/s",
    "ratio": "ratio",
    "ratio_min": "min",
    "ratio_max": "max",
    "cosine_min": "cosine min",
    "engine": "engine",
}


class Pass(NamedTuple):
    """Seconds that each engine took for all texts once, and the smallest cosine between their vectors."""

    reference_s: float
    own_s: float
    cosine_min: float


def main() -> None:
    """Compare on short, medium and long texts, and write one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=120, metavar="N", help="texts of each length (default: 120)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes over the texts (default: 3)")
    options = parser.parse_args()
    embedder = real_embedder()
    rows: list[Row] = []
    with reference_engine() as reference:
        for texts in texts_of_every_length(options.traces):
            say(f"{texts.name} texts")
            run(texts, reference, embedder)
            rows.append(compare(texts, [run(texts, reference, embedder) for _ in range(options.repeats)], embedder))
            emit(rows[-1])
    show_table(rows, _COLUMNS)


def run(texts: Texts, reference: ReferenceEngine, embedder: Embedder) -> Pass:
    """Embed all texts with both engines, in turns."""
    reference_s = own_s = 0.0
    cosines: list[float] = []
    for batch in batches(texts.texts, _BATCH):
        theirs = reference.embed(batch)
        started = time.perf_counter()
        vectors = embedder.embed(batch)
        own_s += time.perf_counter() - started
        reference_s += theirs.seconds
        cosines += np.sum(theirs.vectors * vectors, axis=1).tolist()
    return Pass(reference_s, own_s, min(cosines))


def compare(texts: Texts, passes: list[Pass], embedder: Embedder) -> Row:
    """Summarise the passes."""
    ratios = [one.reference_s / one.own_s for one in passes]
    return {
        "benchmark": "reference",
        "texts": texts.name,
        "tokens": texts.tokens,
        "traces": len(texts.texts),
        "repeats": len(passes),
        "reference_traces_per_s": round(median(len(texts.texts) / one.reference_s for one in passes), 2),
        "traces_per_s": round(median(len(texts.texts) / one.own_s for one in passes), 2),
        "ratio": round(median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "cosine_min": round(min(one.cosine_min for one in passes), 6),
        "engine": embedder.engine,
    }


if __name__ == "__main__":
    main()
