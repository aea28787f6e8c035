"""Texts a second of each engine, on texts of three lengths.

The engines are torch in float32, which is what sentence-transformers does by itself; the default engine; and the reference
SDK's (where it can run): transformers.js from npm, the same weights as ONNX, float32, one text at a time, all cores. They take
turns batch by batch, so that a machine that slows down for a minute slows all. Each has embedded every text before anything is
measured.

- ``traces_per_s``: the median of the passes over the texts; text in, vectors out.
- ``to_torch``, ``to_reference``: the median of the passes' ratios.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean, median
from typing import Final, NamedTuple

from tests.benchmarks.common import Row, arguments, embed_seconds, lengths_of, real_embedder, report, seconds_in_turns, typical
from tests.benchmarks.reference_engine import reference_engine

_REFERENCE: Final = "reference f32"

Embed = Callable[[Sequence[str]], float]
"""Embeds texts; the seconds that it took."""


class Texts(NamedTuple):
    """Texts of about one length, and how many tokens of each the model reads."""

    name: str
    texts: list[str]
    lengths: list[int]


def texts_of_every_length(limit: int) -> list[Texts]:
    """Short, medium and long texts, ``limit`` of each: a trace's objective, its first 1,000 characters, and all of it."""
    traces = typical(limit)
    cuts = {
        "short": [trace.task.objective for trace in traces],
        "medium": [trace.embedding_text[:1_000] for trace in traces],
        "long": [trace.embedding_text for trace in traces],
    }
    return [Texts(name, texts, lengths_of(texts)) for name, texts in cuts.items()]


def main() -> None:
    options = arguments(__doc__, traces=80, repeats=3).parse_args()
    report("engine", rows_of(options.traces, options.repeats))


def rows_of(count: int, repeats: int) -> Iterator[Row]:
    torch, default = real_embedder({"embedding.embedder": "torch"}), real_embedder()
    engines: dict[str, Embed] = {embedder.engine: partial(embed_seconds, embedder) for embedder in (torch, default)}
    with reference_engine() as reference:
        if reference:
            engines[_REFERENCE] = lambda texts: reference.embed(texts).seconds
        for texts in texts_of_every_length(count):
            seconds_in_turns(engines, texts.texts)
            passes = [seconds_in_turns(engines, texts.texts) for _ in range(repeats)]
            yield from (_summary(texts, engine, torch.engine, passes) for engine in engines)


def _summary(texts: Texts, engine: str, torch_engine: str, passes: Sequence[Mapping[str, float]]) -> Row:
    row: Row = {
        "engine": engine,
        "texts": texts.name,
        "tokens": fmean(texts.lengths),
        "traces_per_s": median(len(texts.texts) / each[engine] for each in passes),
        "to_torch": median(each[torch_engine] / each[engine] for each in passes),
    }
    if _REFERENCE in passes[0]:
        row["to_reference"] = median(each[_REFERENCE] / each[engine] for each in passes)
    return row


if __name__ == "__main__":
    main()
