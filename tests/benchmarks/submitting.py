"""How fast one process submits to a real Redis, beside a worker: many at once, from asyncio, and one by one.

The real traces, as parsed JSON and with ids and contents of their own, are submitted in portions, each way in turn, so that a
machine that slows down for a minute slows all. The worker is paused meanwhile, so that it does not share the processor; with
``--busy`` it decides what arrives, and uses most of the processor.

- ``many_per_s``, ``async_per_s``, ``single_per_s``: traces a second by ``Client.submit_many``, by ``AsyncClient.submit_many``
  and by ``Client.submit``; the median of the portions.
- ``ratio``, ``async_ratio``: the median ratio of each to one by one.
- ``cpu_ms``: processor time of this process for a trace of ``submit_many``.
"""

import asyncio
import gc
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from kp_scorer.client import AsyncClient, Client
from kp_scorer.settings import Settings, load_settings

from tests.benchmarks.common import arguments, batches, cpu_seconds, own_redis, report, say, seconds_of
from tests.benchmarks.load import paused, traces
from tests.support.processes import start_worker

Payloads = Sequence[Mapping[str, Any]]


class Portion(NamedTuple):
    """Seconds that a portion took, each way, and processor seconds of the first."""

    many_s: float
    async_s: float
    single_s: float
    cpu_s: float


def main() -> None:
    parser = arguments(__doc__, traces=10_000, portion=1_000)
    parser.add_argument("--busy", action="store_true", help="let the worker work")
    options = parser.parse_args()
    size = options.portion
    portions: list[Portion] = []
    with _ready(busy=options.busy) as settings:
        _measure(settings, _payloads(3 * 200))
        for _ in batches(range(options.traces), size):
            portions.append(_measure(settings, _payloads(3 * size)))
            say(f"{len(portions)}: {size / portions[-1].many_s:,.0f}/s")
    row = {
        "traces": size * len(portions),
        "worker": "busy" if options.busy else "idle",
        "many_per_s": median(size / portion.many_s for portion in portions),
        "async_per_s": median(size / portion.async_s for portion in portions),
        "single_per_s": median(size / portion.single_s for portion in portions),
        "ratio": median(portion.single_s / portion.many_s for portion in portions),
        "async_ratio": median(portion.single_s / portion.async_s for portion in portions),
        "cpu_ms": median(portion.cpu_s for portion in portions) / size * 1_000,
    }
    report("submitting", [row])


@contextmanager
def _ready(*, busy: bool) -> Iterator[Settings]:
    """Run Redis and one worker, which is paused unless it is to work."""
    with ExitStack() as stack:
        url = stack.enter_context(own_redis())
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "worker.log"
        settings = load_settings({"broker.url": url, "redis.url": url, "embedding.required": True})
        worker = stack.enter_context(start_worker(settings, log))
        if not busy:
            stack.enter_context(paused(psutil.Process(worker.process.pid)))
        yield settings


def _payloads(count: int) -> Payloads:
    return [trace.model_dump(mode="json", exclude_none=True) for trace in traces(count)]


def _measure(settings: Settings, items: Payloads) -> Portion:
    """Submit a third of the traces each way."""
    many, from_asyncio, single = batches(items, len(items) // 3)
    gc.collect()
    with Client(settings) as client:
        # Connects.
        client.look_up([""])
        cpu_s = cpu_seconds()
        many_s = seconds_of(lambda: client.submit_many(many, timeout_s=600))
        cpu_s = cpu_seconds() - cpu_s
        single_s = seconds_of(lambda: [client.submit(payload) for payload in single])
    return Portion(many_s, asyncio.run(_submit_from_asyncio(settings, from_asyncio)), single_s, cpu_s)


async def _submit_from_asyncio(settings: Settings, items: Payloads) -> float:
    async with AsyncClient(settings) as client:
        await client.look_up([""])
        started = time.perf_counter()
        await client.submit_many(items, timeout_s=600)
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
