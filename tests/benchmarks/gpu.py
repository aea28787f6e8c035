"""Measures a GPU at work: the engine alone, one worker with and without an embedder, several workers, latency, and scores.

Without a card it measures the engine on the CPU. The traces are the real ones of ``REFERENCE_TRACES``, or the samples. Workers
have default settings; they and the client share the machine.

- ``texts_per_s``: the texts per second of the engine in full passes, tokenized before, with as many passes at once as in a
  worker; ``lone_ms``: the median time of a text by itself; ``gpu_mb``: the most memory that weights and passes take.
- ``traces_per_s``, ``cpu_ms``: the traces decided and published per second, and the workers' processor time for each, medians
  of the portions; ``of_none``, ``cpu_of_none``: the medians of their ratios to the worker without an embedder.
- ``p50_ms``, ``p95_ms``, ``p99_ms``: the time from submission to the published decision, for traces that come at random
  moments at half the rate of one worker.
- ``largest_difference``: the largest difference between a score and the reference's, if there are real traces.
"""

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Final

import torch
from kp_scorer import score_traces
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.embedding.text_embedder import group_by_tokens

from tests.benchmarks.common import MB, Row, arguments, batches, real, real_embedder, report, say, seconds_of, typical
from tests.benchmarks.load import Speed, open_bench, traces
from tests.support.paths import REFERENCE_TRACES

_LONE_TEXTS: Final = 100


def main() -> None:
    parser = arguments(__doc__, texts=20_000, portion=2_000, portions=4, workers=4, latency=2_000)
    report("gpu", rows_of(**vars(parser.parse_args())))


def rows_of(texts: int, portion: int, portions: int, workers: int, latency: int) -> Iterator[Row]:
    embedder = real_embedder()
    yield {"what": "engine", "engine": embedder.engine, **_engine(embedder, texts)}
    if differences := _differences():
        yield {"what": "scores", "traces": len(differences), "largest_difference": max(differences)}
    del embedder
    with open_bench() as ours, open_bench({"embedding.embedder": "none"}) as none:
        speeds = [(ours.decide(each), none.decide(each)) for each in batches(traces(portion * portions), portion)]
        yield from _rates(speeds)
        rate = median(own.per_s for own, _ in speeds) / 2
        shuffle = random.Random(1)
        ways_ms = ours.ways_ms(traces(latency), [shuffle.expovariate(rate) for _ in range(latency)])
        cuts = quantiles(ways_ms, n=100, method="inclusive")
        yield {"what": "latency", "traces_per_s": rate, "p50_ms": cuts[49], "p95_ms": cuts[94], "p99_ms": cuts[98]}
    with open_bench(workers=workers) as several:
        speeds_of_several = [several.decide(each) for each in batches(traces(workers * portion * portions), workers * portion)]
        yield {"what": f"{workers} workers", **_row(speeds_of_several)}


def _engine(embedder: Embedder, count: int) -> Row:
    tokenized = embedder.tokenize_all([trace.embedding_text for trace in typical()])
    alone = [seconds_of(partial(embedder.run, [text], together=True)) for text in islice(cycle(tokenized), _LONE_TEXTS)]
    texts = list(islice(cycle(tokenized), count))
    groups = [
        [texts[index] for index in group] for group in group_by_tokens([each.tokens for each in texts], embedder.max_tokens)
    ]
    with ThreadPoolExecutor(embedder.most_passes) as pool:
        run = partial(embedder.run, together=False)
        list(pool.map(run, groups[:4]))
        seconds = seconds_of(lambda: list(pool.map(run, groups)))
    gpu_mb = torch.cuda.max_memory_allocated() / MB
    return {"texts_per_s": len(texts) / seconds, "lone_ms": median(alone) * 1_000, "gpu_mb": gpu_mb}


def _differences() -> list[float]:
    """Return the difference between each real trace's score and the reference's."""
    items = real()
    if not items:
        return []
    lines = (REFERENCE_TRACES / "expected.jsonl").read_text("utf-8").splitlines()
    expected = [json.loads(line)["score"] for line in lines]
    return [abs(decision.score - score) for decision, score in zip(score_traces(items), expected, strict=True)]


def _rates(speeds: Sequence[tuple[Speed, Speed]]) -> Iterator[Row]:
    with_embedder, without = zip(*speeds, strict=True)
    of_none = median(ours.per_s / none.per_s for ours, none in speeds)
    cpu_of_none = median(ours.cpu_ms / none.cpu_ms for ours, none in speeds)
    yield {"what": "1 worker", **_row(with_embedder), "of_none": of_none, "cpu_of_none": cpu_of_none}
    yield {"what": "1 worker, no embedder", **_row(without)}


def _row(speeds: Sequence[Speed]) -> Row:
    say(", ".join(f"{each.per_s:,.0f}/s" for each in speeds))
    return {"traces_per_s": median(each.per_s for each in speeds), "cpu_ms": median(each.cpu_ms for each in speeds)}


if __name__ == "__main__":
    main()
