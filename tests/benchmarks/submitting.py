"""How fast one process submits: all at once, from asyncio, and one by one, to a real Redis, beside a worker.

The real traces, as parsed JSON and with ids and contents of their own, are submitted in portions, each way in turn, so that a
machine that slows down for a minute slows all. The worker is held meanwhile, so that it does not share the processor; with
``--busy`` it decides what comes, and takes most of the processor for that.

- ``many_per_s``, ``async_per_s``, ``one_by_one_per_s``: traces a second by ``Client.submit_many``, by
  ``AsyncClient.submit_many`` and by ``Client.submit``; the median of the portions.
- ``ratio``, ``async_ratio``: the median ratio of each to one by one.
- ``cpu_ms``: processor time of this process for a trace of ``submit_many``.
"""

import argparse
import asyncio
import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil
from kp_scorer.client import AsyncClient, Client
from kp_scorer.settings import Settings, load_settings

from tests.benchmarks.common import Row, batches, emit, own_redis, say, show_table
from tests.benchmarks.load import held, traces
from tests.support.processes import start_worker

Payloads = Sequence[Mapping[str, Any]]

_COLUMNS: Final = {
    "traces": "traces",
    "worker": "worker",
    "many_per_s": "many/s",
    "async_per_s": "async/s",
    "one_by_one_per_s": "one by one/s",
    "ratio": "ratio",
    "async_ratio": "async ratio",
    "cpu_ms": "CPU ms",
}


class Portion(NamedTuple):
    """Seconds that a portion took, each way, and processor seconds of the first."""

    many_s: float
    async_s: float
    one_by_one_s: float
    cpu_s: float


def main() -> None:
    """Measure and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=10_000, metavar="N", help="submissions each way (default: 10000)")
    parser.add_argument("--portion", type=int, default=1_000, metavar="N", help="submissions at a time (default: 1000)")
    parser.add_argument("--busy", action="store_true", help="let the worker work")
    options = parser.parse_args()
    portions: list[Portion] = []
    with ready(busy=options.busy) as settings:
        measure(settings, payloads(3 * 200))
        for _ in batches(range(options.traces), options.portion):
            portions.append(measure(settings, payloads(3 * options.portion)))
            say(f"{len(portions)}: {options.portion / portions[-1].many_s:,.0f}/s")
    row = summary(portions, options.portion, busy=options.busy)
    emit(row)
    show_table([row], _COLUMNS)


@contextmanager
def ready(*, busy: bool) -> Iterator[Settings]:
    """Run Redis and one worker, which is held unless it is to work."""
    with ExitStack() as stack:
        url = stack.enter_context(own_redis())
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "worker.log"
        settings = load_settings({"broker.url": url, "redis.url": url, "embedding.required": True})
        worker = stack.enter_context(start_worker(settings, log))
        if not busy:
            stack.enter_context(held(psutil.Process(worker.process.pid)))
        yield settings


def payloads(count: int) -> Payloads:
    """So many traces that are new, as their producer has them."""
    return [trace.model_dump(mode="json", exclude_none=True) for trace in traces(count)]


def measure(settings: Settings, items: Payloads) -> Portion:
    """Submit a third of the traces each way."""
    many, from_asyncio, one_by_one = batches(items, len(items) // 3)
    gc.collect()
    process = psutil.Process()
    with Client(settings) as client:
        client.look_up([""])
        cpu_s = sum(process.cpu_times()[:2])
        many_s = seconds(lambda: client.submit_many(many, timeout_s=600))
        cpu_s = sum(process.cpu_times()[:2]) - cpu_s
        one_by_one_s = seconds(lambda: [client.submit(one) for one in one_by_one])
    return Portion(many_s, asyncio.run(asynchronously(settings, from_asyncio)), one_by_one_s, cpu_s)


async def asynchronously(settings: Settings, items: Payloads) -> float:
    """Submit the traces from an event loop; return the seconds."""
    async with AsyncClient(settings) as client:
        await client.look_up([""])
        started = time.perf_counter()
        await client.submit_many(items, timeout_s=600)
        return time.perf_counter() - started


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def summary(portions: Sequence[Portion], size: int, *, busy: bool) -> Row:
    """Summarise the portions."""
    return {
        "benchmark": "submitting",
        "traces": size * len(portions),
        "worker": "busy" if busy else "idle",
        "many_per_s": round(median(size / one.many_s for one in portions)),
        "async_per_s": round(median(size / one.async_s for one in portions)),
        "one_by_one_per_s": round(median(size / one.one_by_one_s for one in portions)),
        "ratio": round(median(one.one_by_one_s / one.many_s for one in portions), 2),
        "async_ratio": round(median(one.one_by_one_s / one.async_s for one in portions), 2),
        "cpu_ms": round(median(one.cpu_s for one in portions) / size * 1_000, 3),
    }


if __name__ == "__main__":
    main()
