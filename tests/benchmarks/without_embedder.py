"""Measures the work around a model: one worker on one core, without an embedder and with words, beside an empty Celery task.

Real traces are put on the queue in portions while the workers are paused, then decided and published at full speed. The same
traces then go, as arguments, to a task of another Celery app that does nothing, on a worker with as many threads as ours may
have messages in flight. Each worker may use one core, and it alone; the clients and Redis use the others.

- ``traces_per_s``, ``cpu_ms``: traces decided and published a second, and processor time of the worker for each; medians.
- ``ready_s``, ``ready_mb``, ``after_mb``: from starting a process to the worker being ready, and its resident memory then,
  medians of the starts; and after all traces.
- ``empty_per_s``: calls of the empty task a second; ``ratio``: the median ratio of the rates.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil
import redis
from celery import Celery
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import WorkerSettings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, batches, own_redis, redis_of, report, say, seconds_of
from tests.benchmarks.load import Speed, open_bench, paused, traces
from tests.benchmarks.memory import Start, measured_start, resident_mb
from tests.support.processes import wait_until

_EMBEDDERS: Final = ("none", "words")
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

    def calls_a_second(self, items: Sequence[ReasoningTrace]) -> float:
        with paused(self.process):
            for trace in items:
                payload = trace.model_dump(mode="json", exclude_none=True)
                self.app.send_task("empty", args=[payload], queue=_QUEUE, argsrepr="", ignore_result=True)
        return len(items) / seconds_of(lambda: wait_until(self.is_idle, timeout_s=600))


def main() -> None:
    options = arguments(__doc__, traces=10_000, portion=1_000, starts=5).parse_args()
    speeds: dict[str, list[Speed]] = {name: [] for name in _EMBEDDERS}
    empty_per_s: list[float] = []
    starts = {name: _starts(name, options.starts) for name in _EMBEDDERS}
    with ExitStack() as stack:
        benches = {name: stack.enter_context(open_bench({"embedding.embedder": name})) for name in _EMBEDDERS}
        empty = stack.enter_context(_empty_worker())
        core = max(os.sched_getaffinity(0))
        for process in (*(bench.process for bench in benches.values()), empty.process):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {core})
        for portion in batches(traces(options.traces), options.portion):
            for name, bench in benches.items():
                speeds[name].append(bench.decide(portion))
            empty_per_s.append(empty.calls_a_second(portion))
            rates = {**{name: each[-1].per_s for name, each in speeds.items()}, "empty": empty_per_s[-1]}
            say(", ".join(f"{name} {rate:,.0f}/s" for name, rate in rates.items()))
        after_mb = {name: resident_mb(bench.process) for name, bench in benches.items()}
    report("without_embedder", (_row(name, speeds[name], empty_per_s, starts[name], after_mb[name]) for name in _EMBEDDERS))


def _starts(embedder: str, count: int) -> list[Start]:
    with own_redis() as url, tempfile.TemporaryDirectory() as directory:
        settings = load_settings({"broker.url": url, "redis.url": url, "embedding.embedder": embedder})
        return [measured_start(settings, Path(directory)) for _ in range(count)]


def _row(name: str, ours: Sequence[Speed], empty_per_s: Sequence[float], starts: Sequence[Start], after_mb: float) -> Row:
    return {
        "embedder": name,
        "traces_per_s": median(each.per_s for each in ours),
        "cpu_ms": median(each.cpu_ms for each in ours),
        "ready_s": median(each.seconds for each in starts),
        "ready_mb": median(each.ready_mb for each in starts),
        "after_mb": after_mb,
        "empty_per_s": median(empty_per_s),
        "ratio": median(each.per_s / its for each, its in zip(ours, empty_per_s, strict=True)),
    }


@contextmanager
def _empty_worker() -> Iterator[EmptyTask]:
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


if __name__ == "__main__":
    main()
