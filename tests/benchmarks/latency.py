"""Measures the time from submitting a trace to its published decision, at ``--load`` of one worker's rate, by default half.

That rate is measured first, on a portion of traces put on the queue while the worker is paused. Then traces are submitted at
the load, evenly spaced, and once more at random moments (with exponential gaps, as from many independent agents). The clock
runs from before ``submit`` is called until the decision is read from its results queue. Client, reader and worker share the
machine.

- ``p50_ms``, ``p95_ms``, ``p99_ms``: this time.
- ``queue_p95_ms`` and so on: the time from arrival to vector if nothing but passes took time, for the same texts and gaps. It
  is simulated, as by ``tests.benchmarks.streams``, from passes measured before and after. ``p95_of_queue`` and so on: the
  measured time in multiples of it.
- ``reference_ms``: the time in which the reference engine, if it can run, embeds one text, the median of some before and some
  after; ``p50_of_reference`` and so on: the measured time in multiples of it.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, islice
from statistics import median, quantiles
from typing import Final

from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, real_embedder, report, say
from tests.benchmarks.load import open_bench, traces
from tests.benchmarks.reference_engine import ReferenceEngine, reference_engine
from tests.benchmarks.streams import measured_passes, simulate

_CUTS: Final = (50, 95, 99)
_PORTION: Final = 200
_REFERENCE_TEXTS: Final = 60


def main() -> None:
    report("latency", rows_of(arguments(__doc__, traces=600, load=0.5).parse_args()))


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    embedder = real_embedder()
    passes = measured_passes(embedder)
    with reference_engine() as reference, open_bench() as bench:
        rate = bench.decide(traces(_PORTION)).per_s * options.load
        say(f"submitting {rate:.1f} a second")
        shuffle = random.Random(1)
        for arrivals in ("even", "random"):
            gaps = [1 / rate if arrivals == "even" else shuffle.expovariate(rate) for _ in range(options.traces)]
            items = traces(options.traces)
            reference_ms = _reference_ms(reference, items)
            cuts = _percentiles(bench.ways_ms(items, gaps))
            reference_ms += _reference_ms(reference, items)
            row: Row = {"arrivals": arrivals, "load": options.load, "traces_per_s": rate, "traces": len(items)}
            row |= {f"p{at}_ms": cut for at, cut in cuts.items()}
            before, passes = passes, measured_passes(embedder)
            texts = [shuffle.choice(each) for each in islice(cycle(zip(before, passes, strict=True)), len(items))]
            queue = _percentiles(simulate(embedder.streams, texts, list(accumulate(gaps))))
            row |= {f"queue_p{at}_ms": cut * 1_000 for at, cut in queue.items()}
            row |= {f"p{at}_of_queue": cuts[at] / 1_000 / cut for at, cut in queue.items()}
            if reference_ms:
                row["reference_ms"] = median(reference_ms)
                row |= {f"p{at}_of_reference": cut / median(reference_ms) for at, cut in cuts.items()}
            yield row


def _percentiles(values: Sequence[float]) -> dict[int, float]:
    return {at: quantiles(values, n=100, method="inclusive")[at - 1] for at in _CUTS}


def _reference_ms(reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]) -> list[float]:
    """Return the milliseconds in which the reference embeds each of some traces; none if it cannot run."""
    if reference is None:
        return []
    return [reference.embed([trace.embedding_text]).seconds * 1_000 for trace in items[:_REFERENCE_TEXTS]]


if __name__ == "__main__":
    main()
