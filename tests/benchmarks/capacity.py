"""Whether the capacity model foretells what workers do here: 1, 2 and 4 of them, at full speed and at random arrivals.

The model is given what the bare engine takes on the same texts, before and after each measurement, and what is around the
engine as other benchmarks measured it. The simulation is given the submissions as they came: how long they are, and the times
between them.

- ``traces_per_s``, ``foretold_per_s``: decided and published a second while there are always some waiting; what the model says.
- ``error``: by how much the model is above what was measured, as a share of that.
- ``p95_ms``, ``foretold_p95_ms``, ``p95_error``: the same for submissions at random moments, at ``load`` of what was measured.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Final, NamedTuple

import psutil
from kp_scorer.capacity.costs import Costs
from kp_scorer.capacity.fleet import Fleet
from kp_scorer.capacity.simulation import Arrival, latencies_s, percentile
from kp_scorer.client import Client
from kp_scorer.embedding import Embedder, usable_cores
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.tokens import Tokens
from kp_scorer.settings import WorkerSettings, load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, batches, emit, own_redis, real_embedder, redis_of, say, show_table
from tests.benchmarks.load import Published, held, traces
from tests.support.processes import start_worker

_BATCH: Final = WorkerSettings().batch_size

_COLUMNS: Final = {
    "workers": "workers",
    "traces_per_s": "traces/s",
    "foretold_per_s": "foretold",
    "error": "error",
    "p95_ms": "p95 ms",
    "foretold_p95_ms": "foretold",
    "p95_error": "error",
}


class Running(NamedTuple):
    """Workers on a Redis of their own, a client to submit to them, and a watcher of the results queues."""

    processes: list[psutil.Process]
    client: Client
    published: Published


def main() -> None:
    """Measure each fleet and write a line of JSON for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=300, metavar="N", help="submissions of each kind (default: 300)")
    parser.add_argument("--load", type=float, default=0.6, metavar="X", help="share of what was measured (default: 0.6)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="how many (default: 1 2 4)")
    options = parser.parse_args()
    embedder = real_embedder()
    engine_ms(embedder, traces(_BATCH))
    rows: list[Row] = []
    for count in options.workers:
        say(f"{count} workers")
        with running(count) as found:
            items = traces(options.traces)
            lengths = lengths_of(items)
            core_ms = [engine_ms(embedder, items[: 3 * _BATCH])]
            rate = throughput(found, items)
            core_ms.append(engine_ms(embedder, items[: 3 * _BATCH]))
            fleet = fleet_of(count, mean(core_ms), mean(lengths))
            came, p95_ms = at_random(found, traces(options.traces), options.load * rate)
            core_ms.append(engine_ms(embedder, items[: 3 * _BATCH]))
        arrivals = [Arrival(gap_s, tokens) for gap_s, tokens in zip(came, lengths, strict=True)]
        foretold_ms = percentile(latencies_s(fleet_of(count, mean(core_ms[1:]), mean(lengths)), arrivals), 0.95) * 1_000
        row: Row = {
            "benchmark": "capacity",
            "workers": count,
            "load": options.load,
            "traces_per_s": round(rate, 2),
            "foretold_per_s": round(fleet.throughput, 2),
            "error": round(fleet.throughput / rate - 1, 3),
            "p95_ms": round(p95_ms, 1),
            "foretold_p95_ms": round(foretold_ms, 1),
            "p95_error": round(foretold_ms / p95_ms - 1, 3),
        }
        rows.append(row)
        emit(row)
    show_table(rows, _COLUMNS)


def fleet_of(count: int, core_ms: float, tokens: float) -> Fleet:
    """So many workers on this machine, where a core embeds texts of so many tokens, on average, in so many milliseconds."""
    # What the bare engine takes of a core, spread over the tokens; the rest of the model is as it is shipped.
    costs = replace(Costs(), embed_ms=0.0, embed_ms_a_token=core_ms / tokens)
    return Fleet(count, usable_cores(), usable_cores(), tokens, costs=costs)


@contextmanager
def running(count: int) -> Iterator[Running]:
    """Start Redis and so many workers with default settings, and warm them up."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(own_redis())
        settings = load_settings({"broker.url": url, "redis.url": url, "embedding.required": True})
        workers = [stack.enter_context(start_worker(settings, directory / f"{index}.log")) for index in range(count)]
        client = stack.enter_context(Client(settings))
        published = Published(stack.enter_context(redis_of(url)), settings)
        found = Running([psutil.Process(worker.process.pid) for worker in workers], client, published)
        throughput(found, traces(96 * count))
        yield found


def engine_ms(embedder: Embedder, items: Sequence[ReasoningTrace]) -> float:
    """Milliseconds of one core that the bare engine takes for a trace, on all of them."""
    started = time.perf_counter()
    for batch in batches([trace.embedding_text for trace in items], _BATCH):
        embedder.embed(batch)
    return (time.perf_counter() - started) * usable_cores() / len(items) * 1_000


def throughput(found: Running, items: Sequence[ReasoningTrace]) -> float:
    """Traces a second that the workers decide when there are always some waiting."""
    before = len(found.published.at)
    with ExitStack() as stack:
        for process in found.processes:
            stack.enter_context(held(process))
        for batch in batches(items, 100):
            found.client.submit_many(batch)
        started = time.time()
    found.published.wait_for(before + len(items))
    return len(items) / (max(found.published.at[trace.id] for trace in items) - started)


def at_random(found: Running, items: Sequence[ReasoningTrace], rate: float) -> tuple[list[float], float]:
    """Submit traces at random moments.

    Returns:
        The seconds between each and the one before, and the 95th percentile of the milliseconds until each was published.
    """
    shuffle = random.Random(1)
    before = len(found.published.at)
    begun: dict[str, float] = {}
    due = time.time()
    for trace in items:
        due += shuffle.expovariate(rate)
        time.sleep(max(0.0, due - time.time()))
        begun[trace.id] = time.time()
        found.client.submit(trace)
    found.published.wait_for(before + len(items))
    moments = list(begun.values())
    took_ms = [(found.published.at[trace.id] - begun[trace.id]) * 1_000 for trace in items]
    return [0.0, *(later - earlier for earlier, later in pairwise(moments))], percentile(took_ms, 0.95)


def lengths_of(items: Sequence[ReasoningTrace]) -> list[int]:
    """Tokens that count of each text."""
    model = find_model("")
    assert model
    return [len(ids) for ids in Tokens(model.tokenizer).of([trace.embedding_text for trace in items])]


if __name__ == "__main__":
    main()
