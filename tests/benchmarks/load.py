"""The code that the benchmarks of whole submissions share: workers under load, and what they and Redis use."""

import gc
import json
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import psutil
import redis
from kp_scorer.client import Client
from kp_scorer.settings import Settings, load_settings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import as_new, cpu_seconds, own_redis, redis_of, typical
from tests.support.processes import start_worker

_READ_AT_ONCE: Final = 100


class RedisUse(NamedTuple):
    """The use of Redis for one trace, on average."""

    cpu_ms: float
    commands: dict[str, float]
    """The number of calls of each command, including those within scripts."""


class Speed(NamedTuple):
    """The speed of deciding, the workers' processor time for a trace, and the use of Redis for submitting and for deciding."""

    per_s: float
    cpu_ms: float
    submitting: RedisUse
    deciding: RedisUse


@contextmanager
def paused(*processes: psutil.Process) -> Iterator[None]:
    """Stop workers while traces are submitted, so that they do not share the processor with the client."""
    with ExitStack() as stack:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
            stack.callback(process.send_signal, signal.SIGCONT)
        yield


class Published:
    """A consumer of the results queues that notes when each decision arrives."""

    def __init__(self, redis_client: redis.Redis, settings: Settings) -> None:
        self._redis_client = redis_client
        self._queues = [settings.queues.name("accepted"), settings.queues.name("rejected")]
        self._arrived = threading.Condition()
        self.at: dict[str, float] = {}
        """The time when each decision was read from its queue, by trace id, in seconds of ``time.time``."""
        threading.Thread(target=self._consume, daemon=True).start()

    def wait_for(self, count: int, timeout_s: float = 300.0) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.at) >= count, timeout_s), f"{len(self.at)} of {count} decisions"

    def _consume(self) -> None:
        while True:
            try:
                next_item: Any = self._redis_client.blpop(self._queues, timeout=1)
                if next_item is None:
                    continue
                now = time.time()
                queue, item = next_item
                # Reading the decisions one by one would take processor time from the worker that is measured.
                items = [item, *(self._redis_client.lpop(queue, _READ_AT_ONCE) or ())]
            except (redis.ConnectionError, ValueError):
                return
            with self._arrived:
                self.at.update((json.loads(each)["properties"]["message_id"], now) for each in items)
                self._arrived.notify_all()


class Bench(NamedTuple):
    """Workers on a Redis of their own, a client that submits to them, and a consumer of the results queues."""

    process: psutil.Process
    client: Client
    published: Published
    redis_client: redis.Redis
    others: Sequence[psutil.Process] = ()

    def decide(self, items: Sequence[ReasoningTrace]) -> Speed:
        """Submit traces while the workers are paused, then let them decide at full speed, until the last decision arrives."""
        before = len(self.published.at)
        with paused(self.process, *self.others), self._measuring_redis(len(items)) as submitting:
            self.client.submit_many(items, timeout_s=600)
        with self._measuring_redis(len(items)) as deciding:
            started, cpu_s = time.time(), self._cpu_s()
            self.published.wait_for(before + len(items))
            elapsed_s = max(self.published.at[trace.id] for trace in items) - started
        cpu_ms = (self._cpu_s() - cpu_s) / len(items) * 1_000
        return Speed(len(items) / elapsed_s, cpu_ms, submitting[0], deciding[0])

    @contextmanager
    def _measuring_redis(self, count: int) -> Iterator[list[RedisUse]]:
        """Measure the use of Redis for each of ``count`` traces while the block runs; then append it to the yielded list."""
        uses: list[RedisUse] = []
        cpu_s, calls = self._redis_use()
        yield uses
        cpu_after_s, calls_after = self._redis_use()
        commands = {name: calls / count for name, calls in (calls_after - calls).most_common()}
        uses.append(RedisUse((cpu_after_s - cpu_s) / count * 1_000, commands))

    def _redis_use(self) -> tuple[float, Counter[str]]:
        """Return the processor seconds that Redis has used, and how often each command was called."""
        cpu: Any = self.redis_client.info("cpu")
        calls: Any = self.redis_client.info("commandstats")
        by_name = Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in calls.items() if "_info" not in name})
        return cpu["used_cpu_user"] + cpu["used_cpu_sys"], by_name

    def _cpu_s(self) -> float:
        return sum(map(cpu_seconds, (self.process, *self.others)))

    def ways_ms(self, items: Sequence[ReasoningTrace], gaps: Sequence[float]) -> list[float]:
        """Submit traces with these gaps in seconds; return the milliseconds from each submission until its decision is read."""
        before, due = len(self.published.at), time.time()
        submitted: dict[str, float] = {}
        for trace, gap in zip(items, gaps, strict=True):
            due += gap
            time.sleep(max(0.0, due - time.time()))
            submitted[trace.id] = time.time()
            self.client.submit(trace)
        self.published.wait_for(before + len(items))
        return [(self.published.at[trace_id] - started) * 1_000 for trace_id, started in submitted.items()]


@contextmanager
def open_bench(changed: Mapping[str, object] = MappingProxyType({}), workers: int = 1) -> Iterator[Bench]:
    """Start Redis and workers, with default settings except those ``changed``; warm them up with texts of every length."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(own_redis())
        settings = load_settings({"broker.url": url, "redis.url": url, **changed})
        started = [stack.enter_context(start_worker(settings, directory / f"worker-{number}.log")) for number in range(workers)]
        assert not any(worker.events("no_embedder") for worker in started), "there is no embedder to measure"
        process, *others = (psutil.Process(worker.process.pid) for worker in started)
        published = Published(stack.enter_context(redis_of(url)), settings)
        redis_client = stack.enter_context(redis_of(url))
        bench = Bench(process, stack.enter_context(Client(settings)), published, redis_client, others)
        bench.decide(traces(96 * workers))
        # The measurements wait for this process, so it must not pause to collect garbage among the traces that it keeps.
        gc.collect()
        gc.freeze()
        yield bench


def traces(count: int) -> list[ReasoningTrace]:
    """Return ``count`` new traces with the texts of the real ones or, where there are none, of the samples."""
    return as_new(list(islice(cycle(typical()), count)))
