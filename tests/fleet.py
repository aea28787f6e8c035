"""What tests of several workers share: a fleet, and judging what it decided."""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from tests.processes import Worker, start_worker
from tests.traces import new_id, sample_traces
from worker.audit import Report, audit
from worker.broker import make_celery
from worker.keys import Keys
from worker.ledger import RedisLedger
from worker.novelty import RedisLog, Window
from worker.novelty.log import Entry
from worker.results import open_results
from worker.settings import Settings


@contextmanager
def start_fleet(settings: Settings, directory: Path, count: int, command: Sequence[str]) -> Iterator[list[Worker]]:
    """Run several workers; all are ready."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start_worker(settings, directory / f"worker-{index}.log", ready=False, command=command))
            for index in range(count)
        ]
        for worker in workers:
            worker.wait_until_ready()
        yield workers


def short_traces(count: int, seed: int) -> list[dict[str, Any]]:
    """Distinct short traces, made of the samples' words, so that some are alike and some are not."""
    shuffle = random.Random(seed)
    samples = sample_traces()
    words = sorted({word for trace in samples for word in trace["task"]["objective"].split()})
    return [
        shuffle.choice(samples)
        | {
            "id": new_id(),
            "task": {"objective": " ".join(shuffle.choices(words, k=12))},
            "steps": [{"step_id": 0, "type": "thought"}, {"step_id": 1, "type": "observation"}],
        }
        for _ in range(count)
    ]


def novelty_logs(settings: Settings, client: redis.Redis) -> list[RedisLog]:
    """The logs that the fleet wrote."""
    return RedisLog.of_all_spaces(client, Keys(settings.redis.prefix), Window.of(settings.novelty), record_ttl_ms=60_000)


def log_entries(settings: Settings, client: redis.Redis) -> list[Entry]:
    """Every entry of the fleet's only log, oldest first."""
    (log,) = novelty_logs(settings, client)
    return list(log.entries())


def audited(settings: Settings, client: redis.Redis) -> Report:
    """Audit the fleet's only log."""
    (log,) = novelty_logs(settings, client)
    ledger = RedisLedger(client, Keys(settings.redis.prefix), ttl_ms=60_000)
    return audit(log, ledger, Window.of(settings.novelty), lambda done, total: None)


def published(settings: Settings) -> list[dict[str, Any]]:
    """Take every decision off the results queues."""
    taken = []
    with open_results(make_celery(settings), settings) as results:
        for item in results.take():
            item.acknowledge()
            taken.append(item.decision)
    return taken
