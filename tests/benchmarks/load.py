"""A worker under load: what the benchmarks of whole submissions share."""

import gc
import json
import signal
import threading
import time
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import psutil
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import as_new, own_redis, real, redis_of, samples
from tests.support.processes import Worker, start_worker


class Bench(NamedTuple):
    """A worker on a Redis of its own, a client to submit to it, and a watcher of the results queues."""

    worker: Worker
    process: psutil.Process
    client: Client
    published: "Published"

    def cpu_s(self) -> float:
        """Processor time that the worker has used."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def held(worker: psutil.Process) -> Iterator[None]:
    """Stop a worker while submitting, so that it does not share the processor with the client; then let it go on."""
    worker.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.send_signal(signal.SIGCONT)


class Published:
    """Takes decisions off the results queues and notes when each came."""

    def __init__(self, redis_client: redis.Redis, settings: Settings) -> None:
        self._redis_client = redis_client
        self._queues = [settings.queues.accepted, settings.queues.rejected]
        self._came = threading.Condition()
        self.at: dict[str, float] = {}
        """When each decision came off its queue, by trace id; seconds of ``time.time``."""
        self._messages: dict[str, dict[str, Any]] = {}
        threading.Thread(target=self._take, daemon=True).start()

    def wait_for(self, count: int, timeout_s: float = 300.0) -> None:
        """Wait until so many decisions came in all."""
        with self._came:
            assert self._came.wait_for(lambda: len(self.at) >= count, timeout_s), f"{len(self.at)} of {count} decisions"

    def body(self, trace_id: str) -> bytes:
        """The JSON of a decision that came."""
        return b64decode(self._messages[trace_id]["body"])

    def _take(self) -> None:
        while True:
            try:
                found: Any = self._redis_client.blpop(self._queues, timeout=1)
            except (redis.ConnectionError, ValueError):
                return
            if found is None:
                continue
            now = time.time()
            message = json.loads(found[1])
            trace_id = message["properties"]["message_id"]
            with self._came:
                self.at[trace_id] = now
                self._messages[trace_id] = message
                self._came.notify_all()


_REAL: Final = MappingProxyType({"embedding.required": True})


@contextmanager
def bench(directory: Path, changed: Mapping[str, object] = _REAL) -> Iterator[Bench]:
    """Start Redis and one worker with default settings but for some, and warm it up with texts of every length."""
    with own_redis() as url, redis_of(url) as redis_client:
        settings = load_settings({"broker.url": url, "redis.url": url, **changed})
        with start_worker(settings, directory / "worker.log") as worker, Client(settings) as client:
            found = Bench(worker, psutil.Process(worker.process.pid), client, Published(redis_client, settings))
            warm = traces(96)
            submit(found, warm)
            found.published.wait_for(len(warm))
            # What is measured waits for this process, which shall not stop to look for garbage in the traces it keeps.
            gc.collect()
            gc.freeze()
            yield found


def traces(count: int) -> list[ReasoningTrace]:
    """So many traces with the texts of the real ones, or of the samples where those do not lie beside the checkout."""
    return as_new(list(islice(cycle((real() or samples()).traces), count)))


def cut(trace: ReasoningTrace, chars: int) -> ReasoningTrace:
    """The same trace with an embedding text of so many characters at most, but never without all of its objective."""
    left, steps = chars - len(trace.task.objective), []
    for step in trace.steps:
        content = (step.content or "")[: max(0, left)]
        left -= len(content)
        steps.append(step.model_copy(update={"content": content or None}))
    return trace.model_copy(update={"steps": tuple(steps)})


def submit(found: Bench, items: Sequence[ReasoningTrace]) -> None:
    """Submit traces while the worker is held."""
    with held(found.process):
        for trace in items:
            found.client.submit(trace)
