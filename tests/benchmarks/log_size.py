"""What a trace costs as the novelty log grows: one worker, a full window of N entries, real embedding.

For each N a Redis of its own gets a log of N random unit vectors, and ``novelty.max_elements`` is N, so that every trace is
compared with N entries. A process of its own then reads the log and decides traces in batches of 8, exactly as a worker does
but for Celery. Texts that differ in length are workloads of their own: the shorter the text, the cheaper its embedding, and
the more the log weighs.

The same process also holds a log of 1,000 entries, and every repeat decides the same texts with both, in alternating order:
``ratio`` is the median of the N-to-1,000 ratios within a repeat, so that a machine that slows down for a minute slows both.
At N = 1,000 itself it is what the method can tell apart from nothing. Embedding, which no log can change but by crowding the
processor's caches, is by far the largest and least steady part; ``at_equal_embedding`` is the ratio that remains when both
sides are charged the mean of their embedding times, and tells small effects of the log from that noise.

- ``traces_per_s``: wall clock from decoded trace to committed decision.
- ``embed_ms``, ``place_ms``, ``rest_ms``: that wall clock per trace: embedding; admitting, reading the tail and scanning the
  window; and the ledger's two round trips with the rest of the decision.
- ``catch_up_s``: the time a worker that starts needs to read the whole log.
- ``rss_before_mb``, ``rss_mb``: resident memory with model and baseline, before and after reading the log.
- ``log_mb``: what Redis says the log takes.

Memory: a million entries take some 2 GB in Redis, as much on disk in the temporary directory, and 1.7 GB in the worker.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
import redis
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.embedding import Embedder
from kp_scorer.scoring import Policy
from kp_scorer.settings import LedgerSettings, NoveltySettings, WorkerSettings
from kp_scorer.store import RedisLedger, RedisLog
from kp_scorer.store.keys import Keys
from kp_scorer.trace import TRACE_ID_PREFIX, ReasoningTrace

from tests.benchmarks.common import (
    Cell,
    Row,
    Workload,
    as_new,
    batches,
    emit,
    own_redis,
    real,
    real_embedder,
    redis_of,
    samples,
    say,
    show_table,
)
from tests.support.processes import wait_until

BASELINE: Final = 1_000
BATCH: Final = 8
DIMENSIONS: Final = 384
_PREFILL_CHUNK: Final = 2_000
_RECORD_TTL_MS: Final = int(LedgerSettings().ttl_s * 1_000)
_LEASE_MS: Final = int(WorkerSettings().decision_timeout_s * 1_000)
_SETTLE_S: Final = 300.0
_MB: Final = 1_000_000

_COLUMNS: Final = {
    "size": "log",
    "workload": "texts",
    "traces_per_s": "traces/s",
    "ratio": "to 1,000",
    "ratio_min": "min",
    "ratio_max": "max",
    "at_equal_embedding": "equal embedding",
    "embed_ms": "embed ms",
    "place_ms": "place ms",
    "rest_ms": "rest ms",
    "catch_up_s": "catch-up s",
    "rss_before_mb": "RSS before",
    "rss_mb": "RSS MB",
    "log_mb": "Redis MB",
}


class Pass(NamedTuple):
    """One run over a workload: traces a second, and milliseconds a trace."""

    traces_per_s: float
    embed_ms: float
    place_ms: float
    rest_ms: float


class Subject(NamedTuple):
    """A decider on a log of one size, and the time its mirror took to fill."""

    decider: Decider
    log: RedisLog
    catch_up_s: float


def main() -> None:
    """Measure every size and write one line of JSON for each size and workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000], metavar="N")
    parser.add_argument("--traces", type=int, default=120, metavar="N", help="at most so many of each workload (default: 120)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes over each workload (default: 3)")
    options = parser.parse_args()
    rows: list[Row] = []
    for size in options.sizes:
        with own_redis() as url:
            with redis_of(url) as redis_client:
                prefill(redis_client, _space(BASELINE, baseline=True), BASELINE)
                prefill(redis_client, _space(size), size)
            # A process of its own, so that its memory is that of a worker with this log and no other.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                for row in pool.submit(measure, url, size, options.traces, options.repeats).result():
                    emit(row)
                    rows.append(row)
    show_table(rows, _COLUMNS)


def _space(size: int, *, baseline: bool = False) -> str:
    return f"baseline-{size}" if baseline else f"own-{size}"


def prefill(redis_client: redis.Redis, space: str, size: int) -> None:
    """Write a log of random unit vectors, one a millisecond until now, as the admission script would have left it."""
    # No rewriting of the append-only file in the background: it would take a core while others are measured.
    redis_client.config_set("auto-aof-rewrite-percentage", 0)
    keys = Keys("kp")
    random = np.random.default_rng(size)
    seconds, microseconds = redis_client.time()
    first_ms = seconds * 1_000 + microseconds // 1_000 - size
    say(f"log of {size:,}: filling")
    for start in range(0, size, _PREFILL_CHUNK):
        count = min(_PREFILL_CHUNK, size - start)
        vectors = random.standard_normal((count, DIMENSIONS), np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        pipeline = redis_client.pipeline(transaction=False)
        for number, vector in enumerate(vectors, start=start + 1):
            trace_id = f"{TRACE_ID_PREFIX}00000000-0000-4000-8000-{number:012}"
            fields = {"i": trace_id, "d": random.bytes(16), "v": vector.astype("<f4").tobytes()}
            pipeline.xadd(keys.log(space), fields, id=f"{first_ms + number}-{number}")  # type: ignore[arg-type]
        pipeline.execute()
    head = {"epoch": "prefilled", "time_ms": first_ms + size, "place": size}
    redis_client.hset(keys.head(space), mapping=head)  # type: ignore[arg-type]
    _settle(redis_client)


def _settle(redis_client: redis.Redis) -> None:
    """Wait until Redis has nothing left to write to disk of what it was given."""
    wait_until(lambda: not _is_writing(redis_client), _SETTLE_S)


def _is_writing(redis_client: redis.Redis) -> bool:
    state: Any = redis_client.info("persistence")
    return bool(state["aof_pending_bio_fsync"] or state["aof_buffer_length"] or state["aof_rewrite_in_progress"])


def measure(url: str, size: int, limit: int, repeats: int) -> list[Row]:
    """Measure one size against the baseline; runs in a process of its own."""
    redis_client = redis_of(url)
    embedder = real_embedder()
    assert embedder.dimensions == DIMENSIONS
    workloads = [workload for workload in (samples(limit), real(limit)) if workload]
    # The buffers of the largest forward pass are the model's, not the log's.
    embedder.embed(sorted((trace.embedding_text for _, traces in workloads for trace in traces), key=len)[-BATCH:])
    baseline = open_log(redis_client, embedder, _space(BASELINE, baseline=True), BASELINE)
    rss_before = psutil.Process().memory_info().rss
    own = open_log(redis_client, embedder, _space(size), size)
    facts: dict[str, Cell] = {
        "catch_up_s": round(own.catch_up_s, 4),
        "rss_before_mb": round(rss_before / _MB, 1),
        "rss_mb": round(psutil.Process().memory_info().rss / _MB, 1),
        "log_mb": round(own.log.info().bytes / _MB, 2),
    }
    return [compare(workload, size, baseline, own, repeats) | facts for workload in workloads]


def open_log(redis_client: redis.Redis, embedder: Embedder, space: str, size: int) -> Subject:
    """A decider whose window is the whole log, with its mirror full."""
    keys = Keys("kp")
    window = NoveltySettings(max_elements=size).window()
    log = RedisLog(redis_client, keys, space, window, _RECORD_TTL_MS)
    novelty = NoveltyMeter(embedder, log, window)
    started = time.perf_counter()
    held = novelty.cache.catch_up()
    catch_up_s = time.perf_counter() - started
    assert held == size, "the log is not what was written"
    decider = Decider(RedisLedger(redis_client, keys, _RECORD_TTL_MS, _LEASE_MS), Policy(), novelty, max_attempts=5)
    return Subject(decider, log, catch_up_s)


def compare(workload: Workload, size: int, baseline: Subject, own: Subject, repeats: int) -> Row:
    """Decide the workload with both logs in turn, ``repeats`` times."""
    bases: list[Pass] = []
    owns: list[Pass] = []
    for subject in (baseline, own):
        run(subject, workload.traces[:BATCH])
    for repeat in range(repeats):
        say(f"log of {size:,}: {workload.name}, {repeat + 1} of {repeats}")
        turns = [(baseline, bases), (own, owns)]
        for subject, passes in turns if repeat % 2 == 0 else reversed(turns):
            passes.append(run(subject, workload.traces))
    ratios = [one.traces_per_s / other.traces_per_s for one, other in zip(owns, bases, strict=True)]
    return {
        "benchmark": "log_size",
        "size": size,
        "workload": workload.name,
        "traces": len(workload.traces),
        "repeats": repeats,
        "traces_per_s": _median(owns, lambda found: found.traces_per_s),
        "baseline_traces_per_s": _median(bases, lambda found: found.traces_per_s),
        "ratio": round(median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "at_equal_embedding": round(median(map(_at_equal_embedding, owns, bases)), 4),
        "embed_ms": _median(owns, lambda found: found.embed_ms),
        "place_ms": _median(owns, lambda found: found.place_ms),
        "baseline_place_ms": _median(bases, lambda found: found.place_ms),
        "rest_ms": _median(owns, lambda found: found.rest_ms),
    }


def run(subject: Subject, traces: list[ReasoningTrace]) -> Pass:
    """Decide the traces' texts once, as traces that are new."""
    fresh = as_new(traces)
    embed_ms = place_ms = 0.0
    started = time.perf_counter()
    for batch in batches(fresh, BATCH):
        decided = subject.decider.decide(batch)[0]
        assert isinstance(decided, Decision)
        embed_ms += decided.timings.embed_ms
        place_ms += decided.timings.place_ms
    elapsed_s = time.perf_counter() - started
    count = len(fresh)
    return Pass(count / elapsed_s, embed_ms / count, place_ms / count, (elapsed_s * 1_000 - embed_ms - place_ms) / count)


def _at_equal_embedding(own: Pass, base: Pass) -> float:
    embed_ms = (own.embed_ms + base.embed_ms) / 2
    return (embed_ms + base.place_ms + base.rest_ms) / (embed_ms + own.place_ms + own.rest_ms)


def _median(passes: list[Pass], field: Callable[[Pass], float]) -> float:
    return round(median(map(field, passes)), 4)


if __name__ == "__main__":
    main()
