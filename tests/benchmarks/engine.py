"""Texts a second of each engine, on texts of three lengths, and how near that is to what the processor could do.

The engines are torch in float32, which is what sentence-transformers does by itself; the default engine; and the reference
SDK's (where it can run): transformers.js from npm, the same weights as ONNX, float32, one text at a time, all cores. They take
turns batch by batch, so that a machine that slows down for a minute slows all. Each has embedded every text before anything is
measured.

- ``traces_per_s``: the median of the passes over the texts; text in, vectors out.
- ``to_torch``, ``to_reference``: the median of the passes' ratios.
- ``of_products``: the share of the time that the model's matrix products alone would take, if they ran as fast as such
  products do by themselves in the engine's precision, measured with torch between the passes (the best of the model's own
  shapes). They are 24 tokens x width squared for the weights and 4 x tokens squared x width for attention, in each layer.
- ``cosine_min``: the smallest cosine between a text's vector and torch's.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from statistics import median
from typing import Final, NamedTuple

import numpy as np
import torch
from kp_scorer.embedding.embedder import MAX_TOKENS, Embedder, Vectors
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.select import select_embedder
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import WorkerSettings

from tests.benchmarks.common import Row, Texts, arguments, batches, emit, real_embedder, say, show_table, texts_of_every_length
from tests.benchmarks.reference_engine import Embedded, is_available, reference_engine

_BATCH: Final = WorkerSettings().batch_size
_PRODUCTS: Final = 60
_PRECISIONS: Final = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_TORCH: Final = "torch"
_REFERENCE: Final = "reference f32"

Embed = Callable[[Sequence[str]], Embedded]


class Pass(NamedTuple):
    """What each engine did with all texts once, and the processor's floating-point operations a second by precision."""

    results: Mapping[str, Embedded]
    flop_per_s: Mapping[str, float]


def main() -> None:
    options = arguments(__doc__, traces=80, repeats=3).parse_args()
    torch_embedder = select_embedder(load_settings({"embedding.embedder": _TORCH}).embedding)
    assert torch_embedder
    embedders = [torch_embedder, real_embedder()]
    engines: dict[str, Embed] = {embedder.engine: _timed(embedder) for embedder in embedders}
    precisions = {name: dtype for name, dtype in _PRECISIONS.items() if any(name in engine.split() for engine in engines)}
    rows: list[Row] = []
    with ExitStack() as stack:
        if is_available():
            engines[_REFERENCE] = stack.enter_context(reference_engine()).embed
        for texts in texts_of_every_length(options.traces):
            say(f"{texts.name} texts")
            run(texts, engines)
            passes = []
            for _ in range(options.repeats):
                rates = {name: _product_rate(dtype) for name, dtype in precisions.items()}
                passes.append(Pass(run(texts, engines), rates))
            for engine in engines:
                rows.append(_summary(texts, engine, torch_embedder.engine, passes))
                emit(rows[-1])
    show_table(rows)


def _timed(embedder: Embedder) -> Embed:
    def embed(texts: Sequence[str]) -> Embedded:
        started = time.perf_counter()
        vectors = embedder.embed(texts)
        return Embedded(vectors, time.perf_counter() - started)

    return embed


def run(texts: Texts, engines: Mapping[str, Embed]) -> dict[str, Embedded]:
    seconds = dict.fromkeys(engines, 0.0)
    vectors: dict[str, list[Vectors]] = {engine: [] for engine in engines}
    for batch in batches(texts.texts, _BATCH):
        for engine, embed in engines.items():
            embedded = embed(batch)
            seconds[engine] += embedded.seconds
            vectors[engine].append(embedded.vectors)
    return {engine: Embedded(np.concatenate(vectors[engine]), seconds[engine]) for engine in engines}


def _summary(texts: Texts, engine: str, torch_engine: str, passes: Sequence[Pass]) -> Row:
    own = [each.results[engine] for each in passes]
    row: Row = {
        "benchmark": "engine",
        "engine": engine,
        "texts": texts.name,
        "tokens": sum(texts.lengths) / len(texts.lengths),
        "traces_per_s": median(len(texts.texts) / result.seconds for result in own),
        "to_torch": median(each.results[torch_engine].seconds / each.results[engine].seconds for each in passes),
        "cosine_min": float(np.sum(own[0].vectors * passes[0].results[torch_engine].vectors, axis=1).min()),
    }
    if _REFERENCE in passes[0].results:
        row["to_reference"] = median(each.results[_REFERENCE].seconds / each.results[engine].seconds for each in passes)
    if precision := next((name for name in passes[0].flop_per_s if name in engine.split()), ""):
        flop = sum(map(_flop_of, texts.lengths))
        row["of_products"] = median(flop / each.flop_per_s[precision] / each.results[engine].seconds for each in passes)
    return row


def _flop_of(tokens: int) -> float:
    """Floating-point operations of the model's matrix products for one text."""
    width, layers = _model_sizes()
    return layers * (24 * tokens * width**2 + 4 * tokens**2 * width)


@cache
def _model_sizes() -> tuple[int, int]:
    """Width and layers of the installed model; its inner width must be four times the width."""
    model = find_model("")
    assert model
    config = json.loads((model.path / "config.json").read_text("utf-8"))
    assert config["intermediate_size"] == 4 * config["hidden_size"]
    return config["hidden_size"], config["num_hidden_layers"]


def _product_rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of matrix products by themselves: the best of the model's own shapes."""
    width, _ = _model_sizes()
    return max(_rate(MAX_TOKENS, width, 4 * width, dtype), _rate(MAX_TOKENS, 4 * width, width, dtype))


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
