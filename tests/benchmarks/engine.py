"""Traces a second for each engine, on texts of three lengths, and how near that is to what the processor could do.

Engines take turns batch by batch, each embedding batches as a worker makes them, so that a machine that slows down for a minute
slows all. Every text was embedded by each once before anything is measured.

- ``traces_per_s``: the median of the passes over the texts; text in, vectors out.
- ``ratio``: to torch in float32, which is what sentence-transformers does by itself; the median of the passes' ratios.
- ``of_products``: the share of the time that the model's matrix products alone would take, if they ran as fast as such
  products do by themselves in the engine's precision, measured with torch between the passes (``gflops``, the best of the
  model's own shapes). They are 24 tokens x width squared for the weights and 4 x tokens squared x width for attention, in
  each layer.
"""

import argparse
import json
import time
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Final

import torch
from kp_scorer.embedding import MAX_TOKENS, Embedder, select_embedder
from kp_scorer.embedding.model import find_model
from kp_scorer.settings import WorkerSettings, load_settings

from tests.benchmarks.common import Row, Texts, batches, emit, say, show_table, texts_of_every_length

_BATCH: Final = WorkerSettings().batch_size
_PRODUCTS: Final = 60
_PRECISIONS: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

_COLUMNS: Final = {
    "engine": "engine",
    "texts": "texts",
    "tokens": "tokens",
    "traces_per_s": "traces/s",
    "ratio": "to torch",
    "of_products": "of products",
    "gflops": "GFLOP/s",
}


def main() -> None:
    """Measure every engine on every length and write one line of JSON for each pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=80, metavar="N", help="texts of each length (default: 80)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes over the texts (default: 3)")
    options = parser.parse_args()
    embedders = [select_embedder(load_settings({"embedding.embedder": name}).embedding) for name in ("torch", "openvino")]
    found = [embedder for embedder in embedders if embedder]
    rows: list[Row] = []
    for texts in texts_of_every_length(options.traces):
        say(f"{texts.name} texts")
        run(texts, found)
        passes: list[list[float]] = []
        rates: list[dict[str, float]] = []
        for _ in range(options.repeats):
            rates.append({name: product_rate(dtype) for name, dtype in _PRECISIONS.items() if name in engine_words(found)})
            passes.append(run(texts, found))
        for index, embedder in enumerate(found):
            own, base = [seconds[index] for seconds in passes], [seconds[0] for seconds in passes]
            rows.append(summary(texts, embedder, own, base, rates))
            emit(rows[-1])
    show_table(rows, _COLUMNS)


def engine_words(embedders: Sequence[Embedder]) -> set[str]:
    """The words of the engines' names, among them their precisions."""
    return {word for embedder in embedders for word in embedder.engine.split()}


def run(texts: Texts, embedders: Sequence[Embedder]) -> list[float]:
    """Embed all texts with each engine, in turns; the seconds of each."""
    seconds = [0.0] * len(embedders)
    for batch in batches(texts.texts, _BATCH):
        for index, embedder in enumerate(embedders):
            started = time.perf_counter()
            embedder.embed(batch)
            seconds[index] += time.perf_counter() - started
    return seconds


def summary(
    texts: Texts, embedder: Embedder, own: Sequence[float], base: Sequence[float], rates: Sequence[dict[str, float]]
) -> Row:
    """Summarise the passes of one engine; ``base`` is what torch took in each of them."""
    (precision,) = engine_words([embedder]) & _PRECISIONS.keys()
    flop = sum(map(flop_of, texts.lengths))
    return {
        "benchmark": "engine",
        "engine": embedder.engine,
        "texts": texts.name,
        "tokens": texts.tokens,
        "traces": len(texts.texts),
        "repeats": len(own),
        "traces_per_s": round(median(len(texts.texts) / seconds for seconds in own), 2),
        "ratio": round(median(other / seconds for other, seconds in zip(base, own, strict=True)), 3),
        "of_products": round(median(flop / rate[precision] / seconds for rate, seconds in zip(rates, own, strict=True)), 3),
        "gflops": round(median(rate[precision] for rate in rates) / 1e9, 1),
    }


def flop_of(tokens: int) -> float:
    """Floating-point operations of the model's matrix products for one text."""
    width, _, layers = model_sizes()
    return layers * (24 * tokens * width**2 + 4 * tokens**2 * width)


@cache
def model_sizes() -> tuple[int, int, int]:
    """Width, inner width and layers of the installed model; the inner width must be four times the width."""
    model = find_model("")
    assert model
    config = json.loads((model.path / "config.json").read_text("utf-8"))
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    assert inner == 4 * width
    return width, inner, layers


def product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of matrix products by themselves: the best of the model's own shapes."""
    width, inner, _ = model_sizes()
    return max(_rate(MAX_TOKENS, width, inner, dtype), _rate(MAX_TOKENS, inner, width, dtype))


def _rate(rows: int, inner: int, columns: int, dtype: torch.dtype) -> float:
    left, right = torch.randn(rows, inner).to(dtype), torch.randn(inner, columns).to(dtype)
    seconds = []
    for _ in range(_PRODUCTS):
        started = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - started)
    return 2 * rows * inner * columns / median(seconds)


if __name__ == "__main__":
    main()
