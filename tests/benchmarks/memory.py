"""Measures how long one worker takes to be ready, and its resident memory then and after it has decided 5,000 traces.

``--embedder words`` measures a worker with that embedder.

- ``start_s``: the time from starting the process until the worker is ready.
- ``starting_mb``: the most resident memory that it uses before it is ready.
- ``ready_mb``: its resident memory when it is ready.
- ``after_mb``: its resident memory after it has decided all traces.
"""

import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from kp_scorer.settings import Settings, load_settings

from tests.benchmarks.common import MB, arguments, batches, own_redis, report, say
from tests.benchmarks.load import open_bench, traces
from tests.support.processes import launch_worker

_PORTION: Final = 500
_OWN_INTERPRETER: Final = {"PYTHONNOUSERSITE": "1"}
"""A variable that keeps the worker from being forked from a process that has already imported everything."""


class Start(NamedTuple):
    """Seconds until a worker was ready, its memory then, and the most that it used before, in MB."""

    seconds: float
    ready_mb: float
    most_mb: float


def main() -> None:
    parser = arguments(__doc__, traces=5_000)
    parser.add_argument("--embedder", default="openvino", help="(default: openvino)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        with own_redis() as url:
            settings = load_settings({"broker.url": url, "redis.url": url, "embedding.embedder": options.embedder})
            start = measured_start(settings, Path(directory))
        row = {
            "start_s": start.seconds,
            "starting_mb": start.most_mb,
            "ready_mb": start.ready_mb,
            "traces": options.traces,
            "after_mb": mb_after(options.traces, options.embedder),
        }
    report("memory", [row])


def measured_start(settings: Settings, directory: Path) -> Start:
    """Start a worker, measure it until it is ready, and stop it."""
    started = time.perf_counter()
    worker = launch_worker(settings, directory / "start.log", variables=_OWN_INTERPRETER)
    process = psutil.Process(worker.process.pid)
    most_mb = 0.0
    try:
        while not worker.events("worker_ready"):
            assert worker.process.poll() is None, worker.text()
            most_mb = max(most_mb, resident_mb(process))
            time.sleep(0.01)
        start = Start(time.perf_counter() - started, resident_mb(process), most_mb)
    finally:
        worker.stop()
    say(f"ready after {start.seconds:.1f} s with {start.ready_mb:.0f} MB, at most {start.most_mb:.0f} MB before")
    return start


def mb_after(count: int, embedder: str) -> float:
    """Return the resident MB of a worker that has decided ``count`` traces."""
    with open_bench({"embedding.embedder": embedder}) as bench:
        process, before = bench.process, len(bench.published.at)
        for number, portion in enumerate(batches(traces(count), _PORTION)):
            bench.client.submit_many(portion)
            # The next portion is submitted while the worker still decides the last one.
            bench.published.wait_for(before + number * _PORTION)
            say(f"{number * _PORTION + len(portion)} submitted, {resident_mb(process):.0f} MB")
        bench.published.wait_for(before + count)
        return resident_mb(process)


def resident_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / MB
    except psutil.NoSuchProcess:
        return 0.0


if __name__ == "__main__":
    main()
