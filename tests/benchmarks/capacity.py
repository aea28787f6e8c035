"""Whether the capacity model predicts what workers do here: 1, 2 and 4 of them, at full speed and at random arrivals.

The model is given what the bare engine takes on the same texts, before and after each measurement, and what is around the
engine as other benchmarks measured it.

- ``traces_per_s``, ``predicted_per_s``: decided and published a second while some always wait; what the model says.
- ``error``: by how much the model is above what was measured, as a share of that.
- ``p95_ms``, ``predicted_p95_ms``, ``p95_error``: the same for submissions at random moments, at ``load`` of what was measured.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import mean, quantiles

from kp_scorer.cli.commands.capacity import Costs, Fleet
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.embedding.select import usable_cores
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import BATCH, Row, arguments, embed_seconds, lengths_of, real_embedder, report, say
from tests.benchmarks.load import open_bench, traces


def main() -> None:
    report("capacity", rows_of(arguments(__doc__, traces=300, load=0.6, workers=[1, 2, 4]).parse_args()))


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    embedder = real_embedder()
    engine_ms(embedder, traces(BATCH))
    for count in options.workers:
        say(f"{count} workers")
        with open_bench(workers=count) as bench:
            items = traces(options.traces)
            tokens = mean(lengths_of([trace.embedding_text for trace in items]))
            core_ms = [engine_ms(embedder, items[: 3 * BATCH])]
            rate = bench.decide(items).per_s
            core_ms.append(engine_ms(embedder, items[: 3 * BATCH]))
            fleet = fleet_of(count, mean(core_ms), tokens)
            shuffle = random.Random(1)
            gaps = [shuffle.expovariate(options.load * rate) for _ in range(options.traces)]
            p95_ms = quantiles(bench.ways_ms(traces(options.traces), gaps), n=20)[-1]
            core_ms.append(engine_ms(embedder, items[: 3 * BATCH]))
        predicted_ms = fleet_of(count, mean(core_ms[1:]), tokens).latency_ms(options.load * rate, 0.95)
        yield {
            "workers": count,
            "load": options.load,
            "traces_per_s": round(rate, 2),
            "predicted_per_s": round(fleet.throughput, 2),
            "error": round(fleet.throughput / rate - 1, 3),
            "p95_ms": round(p95_ms, 1),
            "predicted_p95_ms": round(predicted_ms, 1),
            "p95_error": round(predicted_ms / p95_ms - 1, 3),
        }


def fleet_of(count: int, core_ms: float, tokens: float) -> Fleet:
    """So many workers on this machine, where a core embeds texts of so many tokens, on average, in so many milliseconds."""
    # What the bare engine takes of a core, spread over the tokens; the rest of the model is as it is shipped.
    costs = replace(Costs(), embed_ms=0.0, embed_ms_a_token=core_ms / tokens)
    return Fleet(count, usable_cores(), usable_cores(), tokens, costs=costs)


def engine_ms(embedder: Embedder, items: Sequence[ReasoningTrace]) -> float:
    """Milliseconds of one core that the bare engine takes for a trace, on all of them."""
    texts = [trace.embedding_text for trace in items]
    return embed_seconds(embedder, texts) * usable_cores() / len(items) * 1_000


if __name__ == "__main__":
    main()
