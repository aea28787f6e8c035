"""Measures the cost of placing a trace as the novelty log grows: one mirror, a full window of N entries, random vectors.

For each N, a new Redis gets a log of N entries, and ``novelty.max_elements`` is N, so that every trace is compared with N
entries. A new process reads the log and places batches of 32 in it, as a worker does, but embeds nothing.

- ``place_ms``: the median time to admit a batch, read the tail and scan the window.
- ``catch_up_s``: the time that a starting worker needs to read the whole log.
- ``rss_mb``: the growth of the process's resident memory when it reads the log.
- ``log_mb``: the log's memory, as Redis reports it.

A million entries need some 2 GB in Redis, as much on disk in the temporary directory, and 1.7 GB in the worker.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Final

import numpy as np
import psutil
import redis
from kp_scorer.novelty import Candidate, NoveltyCache
from kp_scorer.settings.sections import LedgerSettings, NoveltySettings
from kp_scorer.store.keys import Keys
from kp_scorer.store.novelty_log import RedisLog
from kp_scorer.trace import TRACE_ID_PREFIX

from tests.benchmarks.common import BATCH, MB, Row, arguments, own_redis, redis_of, report, say, seconds_of, unit_vectors
from tests.support.processes import wait_until

_SPACE: Final = "benchmark"
_PREFILL_CHUNK: Final = 2_000


def main() -> None:
    options = arguments(__doc__, repeats=30, sizes=[1_000, 10_000, 100_000, 1_000_000]).parse_args()
    report("log_size", rows_of(options.sizes, options.repeats))


def rows_of(sizes: Sequence[int], repeats: int) -> Iterator[Row]:
    for size in sizes:
        with own_redis() as url:
            with redis_of(url) as redis_client:
                _prefill(redis_client, size)
            # Measure each log in a new process, whose memory no earlier log has enlarged.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                yield pool.submit(_measure, url, size, repeats).result()


def _trace_id(number: int) -> str:
    return f"{TRACE_ID_PREFIX}00000000-0000-4000-8000-{number:012}"


def _prefill(redis_client: redis.Redis, size: int) -> None:
    """Write a log of random unit vectors, one per millisecond until now, as ``append.lua`` would have left it."""
    # A rewrite of the append-only file in the background would use a core during the measurement.
    redis_client.config_set("auto-aof-rewrite-percentage", 0)
    keys = Keys("kp")
    random = np.random.default_rng(size)
    seconds, microseconds = redis_client.time()
    first_ms = seconds * 1_000 + microseconds // 1_000 - size
    say(f"log of {size:,}: filling")
    for start in range(0, size, _PREFILL_CHUNK):
        pipeline = redis_client.pipeline(transaction=False)
        for number, vector in enumerate(unit_vectors(random, min(_PREFILL_CHUNK, size - start)), start=start + 1):
            fields = {"i": _trace_id(number), "d": random.bytes(16), "v": vector.astype("<f4").tobytes()}
            pipeline.xadd(keys.of_log(_SPACE).log, fields, id=f"{first_ms + number}-{number}")  # type: ignore[arg-type]
        pipeline.execute()
    head = {"epoch": "prefilled", "time_ms": first_ms + size, "place": size}
    redis_client.hset(keys.of_log(_SPACE).head, mapping=head)  # type: ignore[arg-type]
    wait_until(lambda: not _is_writing(redis_client), 300)


def _is_writing(redis_client: redis.Redis) -> bool:
    state = redis_client.info("persistence")
    return bool(state["aof_pending_bio_fsync"] or state["aof_buffer_length"] or state["aof_rewrite_in_progress"])


def _measure(url: str, size: int, repeats: int) -> Row:
    window = NoveltySettings(max_elements=size).window()
    random = np.random.default_rng(size + 1)
    with redis_of(url) as redis_client:
        log = RedisLog(redis_client, Keys("kp"), _SPACE, window, int(LedgerSettings().ttl_s * 1_000))
        cache = NoveltyCache(log, window, 384)
        before_mb, started = psutil.Process().memory_info().rss / MB, time.perf_counter()
        assert cache.catch_up() == size, "the log is not what was written"
        catch_up_s, after_mb = time.perf_counter() - started, psutil.Process().memory_info().rss / MB
        place_s = []
        for repeat in range(repeats):
            vectors = enumerate(unit_vectors(random, BATCH), start=size + repeat * BATCH + 1)
            candidates = [Candidate(_trace_id(number), random.bytes(16), vector) for number, vector in vectors]
            place_s.append(seconds_of(partial(cache.place, candidates)))
        return {
            "size": size,
            "place_ms": median(place_s) * 1_000,
            "catch_up_s": catch_up_s,
            "rss_mb": after_mb - before_mb,
            "log_mb": log.info().bytes / MB,
        }


if __name__ == "__main__":
    main()
