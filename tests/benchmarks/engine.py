"""Texts a second of each engine, on texts of three lengths.

The engines are torch in float32, which is what sentence-transformers does by itself; the default engine; and the reference
SDK's (where it can run): transformers.js from npm, the same weights as ONNX, float32, one text at a time, all cores. They take
turns batch by batch, so that a machine that slows down for a minute slows all. Each has embedded every text before anything is
measured.

- ``traces_per_s``: the median of the passes over the texts; text in, vectors out.
- ``to_torch``, ``to_reference``: the median of the passes' ratios.
- ``cosine_min``: the smallest cosine between a text's vector and torch's.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import fmean, median
from typing import Final

import numpy as np
from kp_scorer.embedding.embedder import Embedder, Vectors
from kp_scorer.settings.sections import WorkerSettings

from tests.benchmarks.common import Row, Texts, arguments, batches, real_embedder, report, say, texts_of_every_length
from tests.benchmarks.reference_engine import Embedded, is_available, reference_engine

_BATCH: Final = WorkerSettings().batch_size
_REFERENCE: Final = "reference f32"

Embed = Callable[[Sequence[str]], Embedded]


def main() -> None:
    options = arguments(__doc__, traces=80, repeats=3).parse_args()
    report("engine", rows_of(options.traces, options.repeats))


def rows_of(count: int, repeats: int) -> Iterator[Row]:
    torch, default = real_embedder({"embedding.embedder": "torch"}), real_embedder()
    engines: dict[str, Embed] = {embedder.engine: partial(timed, embedder) for embedder in (torch, default)}
    with ExitStack() as stack:
        if is_available():
            engines[_REFERENCE] = stack.enter_context(reference_engine()).embed
        for texts in texts_of_every_length(count):
            say(f"{texts.name} texts")
            run(texts, engines)
            passes = [run(texts, engines) for _ in range(repeats)]
            yield from (_summary(texts, engine, torch.engine, passes) for engine in engines)


def timed(embedder: Embedder, texts: Sequence[str]) -> Embedded:
    started = time.perf_counter()
    vectors = embedder.embed(texts)
    return Embedded(vectors, time.perf_counter() - started)


def run(texts: Texts, engines: Mapping[str, Embed]) -> dict[str, Embedded]:
    seconds = dict.fromkeys(engines, 0.0)
    vectors: dict[str, list[Vectors]] = {engine: [] for engine in engines}
    for batch in batches(texts.texts, _BATCH):
        for engine, embed in engines.items():
            embedded = embed(batch)
            seconds[engine] += embedded.seconds
            vectors[engine].append(embedded.vectors)
    return {engine: Embedded(np.concatenate(vectors[engine]), seconds[engine]) for engine in engines}


def _summary(texts: Texts, engine: str, torch_engine: str, passes: Sequence[Mapping[str, Embedded]]) -> Row:
    first = passes[0]
    row: Row = {
        "engine": engine,
        "texts": texts.name,
        "tokens": fmean(texts.lengths),
        "traces_per_s": median(len(texts.texts) / each[engine].seconds for each in passes),
        "to_torch": median(each[torch_engine].seconds / each[engine].seconds for each in passes),
        "cosine_min": float(np.sum(first[engine].vectors * first[torch_engine].vectors, axis=1).min()),
    }
    if _REFERENCE in first:
        row["to_reference"] = median(each[_REFERENCE].seconds / each[engine].seconds for each in passes)
    return row


if __name__ == "__main__":
    main()
