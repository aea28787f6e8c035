"""Simulates how long texts wait for the engine and run in it on 2, 4 and 8 cores, from passes measured on this machine.

Passes of texts of every length are measured side by side, on one core each, and then on all cores together. On another number
of cores, the serial part of a pass is assumed to take as long as here, and the rest to be divided by the cores (Amdahl's law);
the serial part is the one that fits the measurements. Real texts arrive at random moments and are given to streams by the rule
of ``process/embed.py``, each in a pass of its own.

- ``load``: the rate at which texts arrive, as a share of the rate of all cores side by side.
- ``p50``, ``p95``, ``p99``: the time from arrival to vector, in multiples of ``lone_ms``, the mean time of a lone text's pass
  on all cores.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from statistics import mean, quantiles
from typing import Final, NamedTuple

from kp_scorer.embedding.embedder import Embedder, TokenizedText, rounded_up

from tests.benchmarks.common import Row, arguments, real_embedder, report, seconds_of, typical

_TIMES: Final = 12


class Pass(NamedTuple):
    """The seconds of a text's pass: on one core, while the others run passes of their own, and on all cores."""

    one_s: float
    all_s: float


def main() -> None:
    report("streams", rows_of(arguments(__doc__, arrivals=20_000).parse_args().arrivals))


def rows_of(count: int) -> Iterator[Row]:
    embedder = real_embedder()
    passes = measured_passes(embedder)
    one_s, cores = mean(each.one_s for each in passes), embedder.streams
    # The serial part is the share of a pass on one core that more cores do not shorten.
    all_s = mean(each.all_s for each in passes)
    serial = max(0.0, (all_s / one_s - 1 / cores) / (1 - 1 / cores)) if cores > 1 else 0.0
    chance = random.Random(1)
    texts = chance.choices(passes, k=count)
    for streams in (2, 4, 8):
        share = serial + (1 - serial) / streams
        for load in (0.5, 0.8):
            arrivals = list(accumulate(chance.expovariate(load * streams / one_s) for _ in range(count)))
            times_s = simulate(streams, [Pass(text.one_s, text.one_s * share) for text in texts], arrivals)
            cuts = quantiles(times_s, n=100)
            shares = {f"p{at}": cuts[at - 1] / (one_s * share) for at in (50, 95, 99)}
            yield {"cores": streams, "load": load, "lone_ms": one_s * share * 1e3, **shares}


def measured_passes(embedder: Embedder) -> list[Pass]:
    """Return a pass for each typical text, in order: a random one of the passes measured for its rounded lengths."""
    texts = embedder.tokenize_all([embedder.recipe.text(trace) for trace in typical()])
    shapes = [tuple(rounded_up(len(row), embedder.step) for row in text.rows) for text in texts]
    longest = dict(sorted(zip(shapes, texts, strict=True), key=lambda each: each[1].tokens))
    measured = {shape: _some_passes(embedder, text) for shape, text in longest.items()}
    chance = random.Random(1)
    return [chance.choice(measured[shape]) for shape in shapes]


def _some_passes(embedder: Embedder, text: TokenizedText) -> list[Pass]:
    def timed(together: bool) -> float:
        return seconds_of(lambda: embedder.run([text], together=together))

    # The first passes of a shape take longer, so they are not counted.
    timed(True)
    with ThreadPoolExecutor(embedder.streams) as streams:
        list(streams.map(timed, [False] * embedder.streams))
        side_by_side = list(streams.map(timed, [False] * _TIMES))
    return [Pass(one_s, timed(True)) for one_s in side_by_side]


def simulate(streams: int, texts: Sequence[Pass], arrivals: Sequence[float]) -> list[float]:
    """Return the seconds from the arrival of each text to its vector, in the order in which the passes end."""
    waiting: deque[int] = deque()
    ends: list[tuple[float, int]] = []
    has_all = False
    times: list[float] = []
    arrived = 0
    while len(times) < len(arrivals):
        if ends and (arrived == len(arrivals) or ends[0][0] <= arrivals[arrived]):
            now, text = heapq.heappop(ends)
            times.append(now - arrivals[text])
            has_all = False
        else:
            now = arrivals[arrived]
            waiting.append(arrived)
            arrived += 1
        while waiting and not has_all and len(ends) < streams:
            text = waiting.popleft()
            has_all = not ends and len(waiting) < streams // 2
            heapq.heappush(ends, (now + (texts[text].all_s if has_all else texts[text].one_s), text))
    return times


if __name__ == "__main__":
    main()
