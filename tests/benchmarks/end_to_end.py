"""Measures the rate of one worker, from submission through a real broker to published decision, beside those of two engines.

The engines are the worker's own without the rest of the worker, and the reference SDK's.

Traces are submitted in portions. The worker is paused while a portion is put on the queue, then decides it at full speed until
the last decision arrives on its queue. After each portion, the bare engine embeds the same texts in this process, in batches
of the same size, and the reference engine, if it can run, embeds some of them. So a machine that slows down for a minute slows
them all.

- ``texts``: the length of the texts: whole, cut to their first 1,000 characters, or the objective alone.
- ``traces_per_s``: the submissions decided and published per second, the median of the portions.
- ``engine_traces_per_s``, ``of_engine``: the bare engine's rate on the same texts, and the worker's rate as a share of it.
- ``reference_traces_per_s``, ``ratio``: the reference engine's rate, and the worker's rate in multiples of it.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from kp_scorer.embedding.embedder import Embedder
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import BATCH, CHARS, Row, arguments, batches, cut, embed_seconds, real_embedder, report, say
from tests.benchmarks.load import open_bench, traces
from tests.benchmarks.reference_engine import ReferenceEngine, reference_engine

_WARM_UP: Final = 3 * BATCH
_REFERENCE_SHARE: Final = 5
"""The reference embeds only one text in this many, because it is slow and its rate is steady."""


class Rates(NamedTuple):
    """The texts per second of the worker, the bare engine and the reference, which is 0 if that cannot run."""

    worker: float
    engine: float
    reference: float


def main() -> None:
    parser = arguments(__doc__, traces=2_000, portion=192)
    parser.add_argument("--texts", choices=list(CHARS), default="long", help="how long the texts are (default: long)")
    options = parser.parse_args()
    embedder = real_embedder()
    items = [cut(trace, CHARS[options.texts]) for trace in traces(_WARM_UP + options.traces)]
    with reference_engine() as reference, open_bench() as bench:
        bench.decide(items[:_WARM_UP])
        _embed(embedder, reference, items[:_WARM_UP])
        portions = []
        for portion in batches(items[_WARM_UP:], options.portion):
            portions.append(Rates(bench.decide(portion).per_s, *_embed(embedder, reference, portion)))
            say(f"{len(portions)}: {portions[-1].worker:.1f}/s, engine {portions[-1].engine:.1f}/s")
    row: Row = {"texts": options.texts, "traces": options.traces, "engine": embedder.engine}
    report("end_to_end", [row | _summary(portions)])


def _embed(embedder: Embedder, reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]) -> tuple[float, float]:
    """Return the texts per second of the bare engine and of the reference."""
    texts = [trace.embedding_text for trace in items]
    some = texts[::_REFERENCE_SHARE]
    return len(texts) / embed_seconds(embedder, texts), len(some) / reference.embed(some).seconds if reference else 0.0


def _summary(portions: Sequence[Rates]) -> Row:
    row: Row = {
        "traces_per_s": median(rates.worker for rates in portions),
        "engine_traces_per_s": median(rates.engine for rates in portions),
        "of_engine": median(rates.worker / rates.engine for rates in portions),
    }
    if all(rates.reference for rates in portions):
        row["reference_traces_per_s"] = median(rates.reference for rates in portions)
        row["ratio"] = median(rates.worker / rates.reference for rates in portions)
    return row


if __name__ == "__main__":
    main()
