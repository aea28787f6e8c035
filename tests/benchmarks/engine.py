"""Measures the texts per second of each engine, for three lengths: objectives, the first 1,000 characters, and whole texts.

The engines are torch in float32 on the CPU, as sentence-transformers uses it there by default; the default engine, on a GPU if
there is one; and the reference SDK's, if it can run: transformers.js from npm, with the same weights as ONNX, in float32, one
text at a time, on all cores. They take turns batch by batch, so that a machine that slows down for a minute slows them all.
Each engine embeds every text once before the measurement begins.

- ``traces_per_s``: the texts per second from text to vector, the median of the passes over the texts.
- ``to_torch``, ``to_reference``: this rate in multiples of torch's and of the reference's, the medians of the passes.
- ``least_cosine``: the smallest cosine between the default engine's vector of a text and torch's.
- ``gpu_mb``: the most memory that the texts take on a GPU; 0 without one.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median
from typing import Final
from unittest.mock import patch

import torch
from kp_scorer.embedding import select

from tests.benchmarks.common import (
    BATCH,
    CHARS,
    MB,
    Row,
    arguments,
    batches,
    cut,
    embed_seconds,
    lengths_of,
    real_embedder,
    report,
    seconds_in_turns,
    typical,
)
from tests.benchmarks.reference_engine import reference_engine

_REFERENCE: Final = "reference f32"

Embed = Callable[[Sequence[str]], float]
"""A function that embeds texts and returns the seconds that this took."""


def main() -> None:
    options = arguments(__doc__, traces=80, repeats=3).parse_args()
    report("engine", rows_of(options.traces, options.repeats))


def rows_of(count: int, repeats: int) -> Iterator[Row]:
    with patch.object(select, "_GPU_DEVICES", ()):
        on_cpu = real_embedder({"embedding.embedder": "torch"})
    default = real_embedder()
    engines: dict[str, Embed] = {embedder.engine: partial(embed_seconds, embedder) for embedder in (on_cpu, default)}
    with reference_engine() as reference:
        if reference:
            engines[_REFERENCE] = lambda texts: reference.embed(texts).seconds
        for name, chars in CHARS.items():
            texts = [cut(trace, chars).embedding_text for trace in typical(count)]
            seconds_in_turns(engines, texts)
            cosines = [(default.embed(batch) * on_cpu.embed(batch)).sum(axis=1).min() for batch in batches(texts, BATCH)]
            passes = [seconds_in_turns(engines, texts) for _ in range(repeats)]
            row: Row = {"texts": name, "tokens": fmean(lengths_of(texts)), "least_cosine": float(min(cosines))}
            row["gpu_mb"] = torch.cuda.max_memory_allocated() / MB
            for engine in engines:
                row |= {"engine": engine, "traces_per_s": median(len(texts) / each[engine] for each in passes)}
                row["to_torch"] = median(each[on_cpu.engine] / each[engine] for each in passes)
                if reference:
                    row["to_reference"] = median(each[_REFERENCE] / each[engine] for each in passes)
                yield {**row}


if __name__ == "__main__":
    main()
