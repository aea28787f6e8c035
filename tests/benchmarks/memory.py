"""Resident memory of one worker: when it is ready, and while it decides 5,000 traces; and how long it takes to be ready.

Two workers are started before: the first finds no converted model, the second does.

- ``first_start_s``, ``start_s``: from starting the process to the worker being ready; without and with the converted model.
- ``converting_mb``: the most that the first worker and the process that converts for it hold together.
- ``ready_mb``: resident memory of a worker that is ready and found its model.
- ``after_mb``: resident memory after all traces.
- ``slope_kb``: growth over the second half, by least squares, in kB for 1,000 traces.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil
from kp_scorer.settings import Settings, load_settings

from tests.benchmarks.common import Row, batches, emit, own_redis, say, show_table
from tests.benchmarks.load import bench, traces
from tests.support.processes import launch_worker

_MB: Final = 1_000_000
_PORTION: Final = 100

_COLUMNS: Final = {
    "first_start_s": "first start s",
    "converting_mb": "converting MB",
    "start_s": "start s",
    "ready_mb": "ready MB",
    "traces": "traces",
    "after_mb": "after MB",
    "slope_kb": "kB/1,000 traces",
}


class Start(NamedTuple):
    """Seconds until a worker was ready, what it held then, and the most that it and its children held before, in MB."""

    seconds: float
    ready_mb: float
    most_mb: float


def main() -> None:
    """Measure and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=5_000, metavar="N", help="traces to decide (default: 5000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        with own_redis() as url:
            settings = load_settings({"broker.url": url, "redis.url": url, "embedding.required": True})
            first, second = start(settings, Path(directory)), start(settings, Path(directory))
        row: Row = {
            "benchmark": "memory",
            "first_start_s": round(first.seconds, 2),
            "converting_mb": round(first.most_mb, 1),
            "start_s": round(second.seconds, 2),
            "ready_mb": round(second.ready_mb, 1),
            **decide(Path(directory), options.traces),
        }
    emit(row)
    show_table([row], _COLUMNS)


def start(settings: Settings, directory: Path) -> Start:
    """Start a worker, wait until it is ready, and stop it."""
    started = time.perf_counter()
    worker = launch_worker(settings, directory / "start.log")
    process = psutil.Process(worker.process.pid)
    most_mb = 0.0
    try:
        while not worker.events("worker_ready"):
            assert worker.process.poll() is None, worker.text()
            most_mb = max(most_mb, sum(_resident_mb(one) for one in [process, *process.children()]))
            time.sleep(0.01)
        found = Start(time.perf_counter() - started, _resident_mb(process), most_mb)
    finally:
        worker.stop()
    say(f"ready after {found.seconds:.1f} s with {found.ready_mb:.0f} MB, at most {found.most_mb:.0f} MB before")
    return found


def decide(directory: Path, count: int) -> Row:
    """Have one worker decide so many traces and watch its memory."""
    sizes: list[float] = []
    with bench(directory) as found:
        before = len(found.published.at)
        for done, portion in enumerate(batches(traces(count), _PORTION), start=1):
            for trace in portion:
                found.client.submit(trace)
            # The next portion is submitted while the last one is still being decided.
            found.published.wait_for(before + (done - 1) * _PORTION)
            sizes.append(_resident_mb(found.process))
            if done % 5 == 0:
                say(f"{done * _PORTION} submitted, {sizes[-1]:.0f} MB")
        found.published.wait_for(before + count)
        sizes.append(_resident_mb(found.process))
    half = sizes[len(sizes) // 2 :]
    slope_mb = float(np.polyfit(np.arange(len(half)) * _PORTION / 1_000, half, 1)[0])
    return {"traces": count, "after_mb": round(sizes[-1], 1), "slope_kb": round(slope_mb * 1_000, 1)}


def _resident_mb(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / _MB
    except psutil.NoSuchProcess:
        return 0.0


if __name__ == "__main__":
    main()
