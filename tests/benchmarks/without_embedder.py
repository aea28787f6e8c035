"""What is around the engine: one worker on one core, without an embedder, beside an empty Celery task.

Real traces are put on the queue in portions while the worker is held, then decided and published at full speed. The same traces
then go, as arguments, to a task of another Celery app that does nothing, on a worker with as many threads as ours may have
messages in hand. Each worker may use one core, and it alone; the clients and Redis use the others.

- ``traces_per_s``, ``cpu_ms``: traces decided and published a second, and processor time of the worker for each; medians.
- ``empty_per_s``, ``empty_cpu_ms``: calls of the empty task a second, and their processor time; ``ratio``: the median ratio of
  the rates.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil
import redis
from celery import Celery
from kp_scorer.settings import WorkerSettings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, batches, emit, own_redis, redis_of, say, show_table
from tests.benchmarks.load import Bench, bench, held, traces
from tests.support.processes import wait_until

_QUEUE: Final = "empty"
_COLUMNS: Final = {
    "traces": "traces",
    "traces_per_s": "traces/s",
    "cpu_ms": "CPU ms",
    "empty_per_s": "empty/s",
    "empty_cpu_ms": "empty CPU ms",
    "ratio": "ratio",
}


class Portion(NamedTuple):
    """Messages a second and processor milliseconds for each, of our worker and of Celery's."""

    rate: float
    cpu_ms: float
    empty_rate: float
    empty_cpu_ms: float


class Empty(NamedTuple):
    """Celery's worker with the empty task, an app to call it by, and its queue."""

    process: psutil.Process
    app: Celery
    redis_client: redis.Redis

    def is_done(self) -> bool:
        """Whether no call waits and none is in hand."""
        return not (self.redis_client.llen(_QUEUE) or self.redis_client.hlen("unacked"))


def main() -> None:
    """Measure and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=10_000, metavar="N", help="submissions (default: 10000)")
    parser.add_argument("--portion", type=int, default=1_000, metavar="N", help="submissions at a time (default: 1000)")
    options = parser.parse_args()
    portions: list[Portion] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = stack.enter_context(bench(directory, {"embedding.embedder": "none"}))
        empty = stack.enter_context(empty_worker())
        core = max(os.sched_getaffinity(0))
        for process in (found.process, empty.process):
            pin(process, core)
        for portion in batches(traces(options.traces), options.portion):
            portions.append(Portion(*decided(found, portion), *called(empty, portion)))
            say(f"{len(portions)}: {portions[-1].rate:,.0f}/s, empty {portions[-1].empty_rate:,.0f}/s")
    row: Row = {
        "benchmark": "without_embedder",
        "traces": options.traces,
        "traces_per_s": round(median(one.rate for one in portions), 1),
        "cpu_ms": round(median(one.cpu_ms for one in portions), 3),
        "empty_per_s": round(median(one.empty_rate for one in portions), 1),
        "empty_cpu_ms": round(median(one.empty_cpu_ms for one in portions), 3),
        "ratio": round(median(one.rate / one.empty_rate for one in portions), 2),
    }
    emit(row)
    show_table([row], _COLUMNS)


@contextmanager
def empty_worker() -> Iterator[Empty]:
    """Run Redis and Celery's worker with the empty task."""
    with own_redis() as url, redis_of(url) as redis_client, Celery("caller", broker=url, set_as_current=False) as app:
        command = ["celery", "--quiet", "-A", "tests.benchmarks.empty_task", "worker", "--pool", "threads"]
        command += [
            "--concurrency",
            str(WorkerSettings().concurrency),
            "--queues",
            _QUEUE,
            "--without-gossip",
            "--loglevel",
            "error",
        ]
        environment = os.environ | {"EMPTY_BROKER_URL": url, "PYTHONWARNINGS": "ignore"}
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, "-m", *command], env=environment, **quiet) as worker:
            try:
                found = Empty(psutil.Process(worker.pid), app, redis_client)
                app.send_task("empty", args=[1], queue=_QUEUE, ignore_result=True)
                wait_until(lambda: app.control.inspect(timeout=0.5).ping() and found.is_done())
                yield found
            finally:
                worker.send_signal(signal.SIGTERM)


def pin(process: psutil.Process, core: int) -> None:
    """Let every thread of a process use one core alone; those that it starts later inherit that."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def decided(found: Bench, items: Sequence[ReasoningTrace]) -> tuple[float, float]:
    """Have our worker decide traces; return how many a second, and processor milliseconds for each."""
    before = len(found.published.at)
    with held(found.process):
        found.client.submit_many(items, timeout_s=600)
    started, cpu_s = time.time(), found.cpu_s()
    found.published.wait_for(before + len(items))
    elapsed_s = max(found.published.at[trace.id] for trace in items) - started
    return len(items) / elapsed_s, (found.cpu_s() - cpu_s) / len(items) * 1_000


def called(empty: Empty, items: Sequence[ReasoningTrace]) -> tuple[float, float]:
    """Have Celery's worker do nothing with traces; return how many a second, and processor milliseconds for each."""
    with held(empty.process):
        for trace in items:
            payload = trace.model_dump(mode="json", exclude_none=True)
            empty.app.send_task("empty", args=[payload], queue=_QUEUE, argsrepr="", ignore_result=True)
    started, cpu_s = time.time(), sum(empty.process.cpu_times()[:2])
    wait_until(empty.is_done, timeout_s=600)
    return len(items) / (time.time() - started), (sum(empty.process.cpu_times()[:2]) - cpu_s) / len(items) * 1_000


if __name__ == "__main__":
    main()
