"""How long texts wait for the engine and are in it, with 2, 4 and 8 cores: simulated, from passes measured here.

Passes of long texts are measured on one core each, side by side, and on all cores together. With more cores than here, a pass
on all of them takes its serial share as before, and the rest divided by the cores (Amdahl), by the share that fits what two
cores measure. Texts arrive at random moments and are given to streams by the rule of ``process/decide.py``.

- ``load``: texts that arrive, as a share of what all cores can do side by side.
- ``p50``, ``p95``, ``p99``: from arrival to vector, in times of a lone text's pass on all cores.
"""

import heapq
import random
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median, quantiles

from kp_scorer.embedding.embedder import Embedder, TokenizedText

from tests.benchmarks.common import Row, arguments, real_embedder, report, seconds_of, typical


def main() -> None:
    options = arguments(__doc__, texts=40, arrivals=20_000).parse_args()
    report("streams", rows_of(options.texts, options.arrivals))


def rows_of(text_count: int, arrivals: int) -> Iterator[Row]:
    embedder = real_embedder()
    texts = [embedder.tokenize(embedder.recipe.text(trace)) for trace in typical(text_count)]
    one_s, all_s = pass_seconds(embedder, texts)
    cores = embedder.streams
    # Of a pass on one core, what more cores do not shorten.
    serial = max(0.0, (all_s / one_s - 1 / cores) / (1 - 1 / cores)) if cores > 1 else 0.0
    for streams in (2, 4, 8):
        together_s = one_s * (serial + (1 - serial) / streams)
        for load in (0.5, 0.8):
            cuts = quantiles(simulate(streams, one_s, together_s, load, arrivals), n=100)
            shares = {f"p{at}": cuts[at - 1] / together_s for at in (50, 95, 99)}
            yield {"cores": streams, "load": load, "lone_ms": together_s * 1e3, **shares}


def pass_seconds(embedder: Embedder, texts: list[TokenizedText]) -> tuple[float, float]:
    """The median seconds of a text's pass on one core while the others have one, too; and of one on all cores."""

    def timed(text: TokenizedText, together: bool) -> float:
        return seconds_of(lambda: embedder.run([text], together=together))

    with ThreadPoolExecutor(embedder.streams) as streams:
        list(streams.map(lambda text: timed(text, False), texts))
        side_by_side = list(streams.map(lambda text: timed(text, False), texts))
    return median(side_by_side), median(timed(text, True) for text in texts)


def simulate(streams: int, one_s: float, together_s: float, load: float, count: int) -> list[float]:
    """Seconds from arrival to vector of so many texts."""
    chance = random.Random(1)
    rate = load * streams / one_s
    waiting: deque[float] = deque()
    ends: list[tuple[float, float]] = []
    has_all = False
    times: list[float] = []
    arrival = chance.expovariate(rate)
    arrived = 0
    while len(times) < count:
        if ends and (arrived == count or ends[0][0] <= arrival):
            now, arrived_at = heapq.heappop(ends)
            times.append(now - arrived_at)
            has_all = False
        else:
            now = arrival
            waiting.append(now)
            arrived += 1
            arrival = now + chance.expovariate(rate)
        while waiting and not has_all and len(ends) < streams:
            first = waiting.popleft()
            has_all = not ends and len(waiting) < streams // 2
            heapq.heappush(ends, (now + (together_s if has_all else one_s), first))
    return times


if __name__ == "__main__":
    main()
