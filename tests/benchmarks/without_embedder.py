"""What is around the engine: one worker on one core, without an embedder, beside an empty Celery task.

Real traces are put on the queue in portions while the worker is paused, then decided and published at full speed. The same
traces then go, as arguments, to a task of another Celery app that does nothing, on a worker with as many threads as ours may
have messages in flight. Each worker may use one core, and it alone; the clients and Redis use the others.

- ``traces_per_s``, ``cpu_ms``: traces decided and published a second, and processor time of the worker for each; medians.
- ``empty_per_s``, ``empty_cpu_ms``: calls of the empty task a second, and their processor time; ``ratio``: the median ratio of
  the rates.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Final, NamedTuple

import psutil
import redis
from celery import Celery
from kp_scorer.settings import WorkerSettings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, batches, own_redis, redis_of, report, say
from tests.benchmarks.load import Speed, cpu_seconds, open_bench, paused, traces
from tests.support.processes import wait_until

_QUEUE: Final = "empty"
_WORKER: Final = (
    *(sys.executable, "-m", "celery", "--quiet", "-A", "tests.benchmarks.empty_task", "worker", "--pool", "threads"),
    *("--concurrency", str(WorkerSettings().concurrency), "--queues", _QUEUE, "--without-gossip", "--loglevel", "error"),
)


class EmptyTask(NamedTuple):
    process: psutil.Process
    app: Celery
    redis_client: redis.Redis

    def is_idle(self) -> bool:
        return not (self.redis_client.llen(_QUEUE) or self.redis_client.hlen("unacked"))

    def run(self, items: Sequence[ReasoningTrace]) -> Speed:
        with paused(self.process):
            for trace in items:
                payload = trace.model_dump(mode="json", exclude_none=True)
                self.app.send_task("empty", args=[payload], queue=_QUEUE, argsrepr="", ignore_result=True)
        started, cpu_s = time.time(), cpu_seconds(self.process)
        wait_until(self.is_idle, timeout_s=600)
        return Speed(len(items) / (time.time() - started), (cpu_seconds(self.process) - cpu_s) / len(items) * 1_000)


def main() -> None:
    options = arguments(__doc__, traces=10_000, portion=1_000).parse_args()
    speeds: list[tuple[Speed, Speed]] = []
    with ExitStack() as stack:
        bench = stack.enter_context(open_bench({"embedding.embedder": "none"}))
        empty = stack.enter_context(_empty_worker())
        core = max(os.sched_getaffinity(0))
        for process in (*bench.processes, empty.process):
            _pin(process, core)
        for portion in batches(traces(options.traces), options.portion):
            speeds.append((bench.decide(portion), empty.run(portion)))
            say(f"{len(speeds)}: {speeds[-1][0].per_s:,.0f}/s, empty {speeds[-1][1].per_s:,.0f}/s")
    row: Row = {
        "benchmark": "without_embedder",
        "traces": options.traces,
        "traces_per_s": median(ours.per_s for ours, _ in speeds),
        "cpu_ms": median(ours.cpu_ms for ours, _ in speeds),
        "empty_per_s": median(theirs.per_s for _, theirs in speeds),
        "empty_cpu_ms": median(theirs.cpu_ms for _, theirs in speeds),
        "ratio": median(ours.per_s / theirs.per_s for ours, theirs in speeds),
    }
    report([row])


@contextmanager
def _empty_worker() -> Iterator[EmptyTask]:
    """Run Redis and Celery's worker with the empty task."""
    with own_redis() as url, redis_of(url) as redis_client, Celery("caller", broker=url, set_as_current=False) as app:
        environment = os.environ | {"EMPTY_BROKER_URL": url, "PYTHONWARNINGS": "ignore"}
        null = subprocess.DEVNULL
        with subprocess.Popen(_WORKER, env=environment, stdout=null, stderr=null) as worker:
            try:
                empty = EmptyTask(psutil.Process(worker.pid), app, redis_client)
                app.send_task("empty", args=[1], queue=_QUEUE, ignore_result=True)
                wait_until(lambda: app.control.inspect(timeout=0.5).ping() and empty.is_idle())
                yield empty
            finally:
                worker.send_signal(signal.SIGTERM)


def _pin(process: psutil.Process, core: int) -> None:
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


if __name__ == "__main__":
    main()
