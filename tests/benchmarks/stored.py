"""Measures the cost of commands by the amount stored: records with decisions, a log of the default length, and dead letters.

For each N, a new Redis without an append-only file gets N records. Each command runs in a new process, whose time includes the
start of Python; its standard output is discarded.

- ``seconds``: the time from the command's start to its end.
- ``peak_mb``: its largest resident memory.

In the end Redis starts again from a copy of its data, and a worker that counts words starts at the same moment. The rows
``Redis loads`` and ``worker`` have the seconds until each is ready.

With ``--waiting N`` one more row shows what the client's notes about N samples that wait in RabbitMQ take in Redis.

- ``redis_mb``: the memory of these notes.
- ``trace_bytes``: the mean size of the traces, which are part of them.

Two million records need some 5 GB in Redis.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import redis
from kp_scorer.local.embedded_redis import redis_executable
from kp_scorer.settings import load_settings
from kp_scorer.settings.sections import NoveltySettings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Submission
from kp_scorer.trace import TRACE_ID_PREFIX

from tests.benchmarks.common import BATCH, Row, arguments, as_new, batches, own_redis, redis_of, report, samples, say
from tests.benchmarks.round_trips import random_decider
from tests.support.builders import BUILT_IN_DOMAINS, decision
from tests.support.processes import launch_worker, wait_until
from tests.support.servers import RedisServer, answers

_KEYS: Final = Keys("kp")
_AT_ONCE: Final = 2_000
_TTL_MS: Final = 86_400_000
_SCORES: Final = 5_000
"""The number of decisions that differ in more than their ids."""
_FORGOTTEN: Final = 1_000


def main() -> None:
    options = arguments(__doc__, letters=100_000, records=[200_000, 2_000_000], waiting=0).parse_args()
    waiting = [_waiting_measured(options.waiting)] if options.waiting else []
    report("stored", chain(rows_of(options.records, options.letters), waiting))


def rows_of(sizes: Sequence[int], letters: int) -> Iterator[Row]:
    for records in sizes:
        with tempfile.TemporaryDirectory(prefix="kp-copy-") as copy:
            for row in chain(_commands_measured(records, letters, copy), _start_measured(Path(copy))):
                yield {"records": records, **row}


def _commands_measured(records: int, letters: int, copy: str) -> Iterator[Row]:
    """Fill a Redis, save its data in the directory ``copy``, and measure the cost of each command."""
    with _server(Path(copy)) as server, redis_of(server.url) as client:
        client.config_set("appendonly", "no")
        _fill_records(client, records)
        _fill_log(client, records)
        _fill_letters(client, letters)
        client.save()
        ids = "".join(f"{_trace_id(number)}\n" for number in range(records - _FORGOTTEN, records))
        with_stdin = {"re-decide --stored --thresholds /dev/stdin": "[scoring]\nthreshold = 0.5\n", "forget -": ids}
        for command, stdin in {**dict.fromkeys(_commands(records), ""), **with_stdin, "dead-letter drop --yes": ""}.items():
            yield _measured(server.url, command, stdin)


def _waiting_measured(count: int) -> Row:
    """Measure the memory that traces waiting in RabbitMQ take in an otherwise empty Redis."""
    traces = [trace.model_dump_json(exclude_none=True).encode() for trace in samples()]
    with own_redis() as url, redis_of(url) as client, Store.open(load_settings({"redis.url": url})) as store:
        client.config_set("appendonly", "no")
        size_bytes, before_bytes, started = 0, client.info("memory")["used_memory"], time.perf_counter()
        for start in range(0, count, _AT_ONCE):
            noted = [
                Submission(_trace_id(number), number.to_bytes(16, "big"), traces[number % len(traces)])
                for number in range(start, min(start + _AT_ONCE, count))
            ]
            size_bytes += sum(len(each.payload) for each in noted)
            store.ledger.submit(noted)
            if not start % 100_000:
                say(f"noting: {start:,} of {count:,} traces")
        seconds, used_bytes = time.perf_counter() - started, client.info("memory")["used_memory"] - before_bytes
    row: Row = {"command": "waiting", "records": count, "seconds": seconds}
    return row | {"redis_mb": used_bytes / 1e6, "trace_bytes": size_bytes / count}


def _start_measured(directory: Path) -> Iterator[Row]:
    """Measure how long Redis takes to load a copy, and how long a worker that starts at the same time takes to be ready."""
    server = _server(directory)
    settings = load_settings({"broker.url": server.url, "redis.url": server.url, "embedding.embedder": "words"})
    server.launch("appendonly no")
    started = time.perf_counter()
    worker = launch_worker(settings, directory / "worker.log")
    try:
        with redis_of(server.url) as client:
            wait_until(lambda: answers(client), timeout_s=600)
        yield {"command": "Redis loads", "seconds": time.perf_counter() - started}
        worker.wait_until_ready()
        seconds = time.perf_counter() - started
        yield {"command": "worker", "seconds": seconds, "peak_mb": worker.peak_bytes() / 1e6}
    finally:
        worker.stop()
        server.kill()


def _server(directory: Path) -> RedisServer:
    return RedisServer(directory, redis_executable())


def _commands(records: int) -> list[str]:
    beginning = _trace_id(records // 2).removeprefix(TRACE_ID_PREFIX)[:8]
    letter = f"{1:032x}"
    return [
        "--version",
        "cache info",
        f"explain {_trace_id(records // 2)}",
        f"explain {beginning}",
        "audit",
        "audit --sample 1000",
        "dead-letter list",
        f"dead-letter show {letter}",
        "calibrate --stored --accept 20%",
        "calibrate --stored --precision 90%",
        "quality --stored",
        "report --stored --text",
        "export --agent nobody",
        "export --namespace nobody",
        f"forget {_trace_id(0)}",
    ]


def _measured(url: str, command: str, stdin: str) -> Row:
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as notes:
        given.write(stdin.encode())
        given.seek(0)
        arguments = [sys.executable, "-m", "kp_scorer.cli", *command.split()]
        environment, started, peak = os.environ | {"KP_BROKER_URL": url}, time.perf_counter(), 0
        process = psutil.Popen(arguments, env=environment, stdin=given, stdout=subprocess.DEVNULL, stderr=notes)
        while process.poll() is None:
            with suppress(psutil.Error):
                peak = max(peak, process.memory_info().rss)
            time.sleep(0.01)
        seconds = time.perf_counter() - started
        notes.seek(0)
        *_, last = notes.read().decode().splitlines() or [""]
    say(f"{command}: exit code {process.returncode}, {seconds:.2f} s: {last}")
    return {"command": command, "seconds": seconds, "peak_mb": peak / 1e6}


def _trace_id(number: int) -> str:
    # The factor makes the beginnings of ids differ, as those of random ids do.
    return f"{TRACE_ID_PREFIX}{number * 2_654_435_761 % 2**32:08x}-0000-4000-8000-{number:012}"


def _fill_records(client: redis.Redis, records: int) -> None:
    scores = np.random.default_rng(1).beta(4, 4, _SCORES)
    domains = [BUILT_IN_DOMAINS[number % len(BUILT_IN_DOMAINS)] for number in range(_SCORES)]
    stored = [
        decision("kp:trace:ID", score=float(score), domain=domain).model_dump_json().encode()
        for score, domain in zip(scores, domains, strict=True)
    ]
    for start in range(0, records, _AT_ONCE):
        pipeline = client.pipeline(transaction=False)
        for number in range(start, min(start + _AT_ONCE, records)):
            text = stored[number % _SCORES].replace(b"kp:trace:ID", _trace_id(number).encode())
            _keep(pipeline, _KEYS.record(_trace_id(number)), {"state": "decided", "digest": bytes(16), "decision": text})
        pipeline.execute()
        if not start % 100_000:
            say(f"filling: {start:,} of {records:,} records")


def _fill_log(client: redis.Redis, records: int) -> None:
    """Have a worker's decider decide the newest records again, as many as the log has places for."""
    decider, made = random_decider(client, _KEYS), cycle(samples())
    numbers = range(max(0, records - NoveltySettings().window().kept_elements), records)
    client.delete(*(_KEYS.record(_trace_id(number)) for number in numbers))
    for batch in batches(numbers, BATCH):
        new = as_new(list(islice(made, len(batch))))
        decider.decide([trace.model_copy(update={"id": _trace_id(number)}) for number, trace in zip(batch, new, strict=True)])
    client.hset(_KEYS.counts, mapping={"submitted": records, "decided": records})


def _fill_letters(client: redis.Redis, letters: int) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(letters):
        letter_id = f"{number:032x}"
        fields = {"reason": "invalid", "detail": "steps: expected more", "trace_id": _trace_id(10**9 + number), "payload": "{}"}
        times = dict.fromkeys(("first_ms", "last_ms", "burials", "deliveries"), 1)
        _keep(pipeline, _KEYS.dead_letter(letter_id), {**fields, **times})
        pipeline.zadd(_KEYS.dead_letters, {letter_id: number // 10})
    pipeline.execute()


def _keep(pipeline: Any, key: str, fields: dict[str, Any]) -> None:
    pipeline.hset(key, mapping=fields)
    pipeline.pexpire(key, _TTL_MS)


if __name__ == "__main__":
    main()
