"""How often a worker talks to Redis, and how much: counted, not timed; no model needed.

Deciding: batches of samples as traces that are new, that are redelivered, and without an embedder. Ends with exit status 1 if
a batch takes other than the round trips promised: 3 for new traces (2 without an embedder), 1 for redelivered ones.

- ``round_trips``: changes from writing to reading on the worker's connection, per batch. Connecting and loading of scripts,
  once a connection, are left out.
- ``sent_bytes``, ``received_bytes``: per trace, as seen by the worker; Redis' own count of network traffic (INFO), less what
  asking for it costs.

A fleet: k caches on one log take turns at placing batches of 8, then all read to the end.

- ``sent_bytes``, ``received_bytes``: per trace and worker. Every worker reads every entry, so what Redis has to send for one
  trace is ``fleet_received_bytes``, k times as much.
"""

import argparse
import hashlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from typing import Any, Final, Literal

import numpy as np
import redis
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.embedding import TRACE
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.novelty import Candidate, NoveltyCache
from kp_scorer.scoring import Policy
from kp_scorer.settings import LedgerSettings, NoveltySettings, WorkerSettings
from kp_scorer.store import RedisLedger, RedisLog
from kp_scorer.store.keys import Keys
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, as_new, batches, emit, own_redis, redis_of, samples, say, show_table

Case = Literal["new", "redelivered", "no_embedder"]

_PROMISED: Final[dict[Case, int]] = {"new": 3, "redelivered": 1, "no_embedder": 2}
_FLEET_BATCH: Final = 8
_RECORD_TTL_MS: Final = int(LedgerSettings().ttl_s * 1_000)
_LEASE_MS: Final = int(WorkerSettings().decision_timeout_s * 1_000)
_WINDOW: Final = NoveltySettings().window()

_COLUMNS: Final = {
    "case": "case",
    "batch": "batch",
    "workers": "workers",
    "traces": "traces",
    "round_trips": "round trips/batch",
    "sent_bytes": "sent B/trace",
    "received_bytes": "received B/trace",
    "fleet_received_bytes": "by the fleet",
}


class HashEmbedder:
    """A unit vector that follows from the text alone."""

    name = "hash"
    engine = "python"
    space = "benchmark"
    dimensions = 384
    recipe = TRACE
    tokens_embedded = 0

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> Vectors:
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
        vector = np.random.default_rng(seed).standard_normal(self.dimensions, np.float32)
        unit: Vectors = vector / np.linalg.norm(vector)
        return unit


class Tally:
    """What one worker's connection did."""

    def __init__(self) -> None:
        self.round_trips = 0
        self.unanswered = False


class CountingConnection(redis.Connection):
    """A connection that tells a tally whenever reading follows writing."""

    def __init__(self, *, tally: Tally, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._tally = tally

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]
        self._tally.unanswered = True

    def read_response(self, *args: Any, **options: Any) -> Any:
        self._tally.round_trips += self._tally.unanswered
        self._tally.unanswered = False
        return super().read_response(*args, **options)


class Traffic:
    """Redis' count of the bytes that came in and went out since the meter was set up, its own questions left out."""

    def __init__(self, redis_client: redis.Redis) -> None:
        self._redis_client = redis_client
        self._read()
        start = self._read()
        # Asking once more: one question in and, as Redis counts a reply after writing it, the previous one's reply out.
        self._start = self._read()
        self._idle = [now - before for now, before in zip(self._start, start, strict=True)]

    def _read(self) -> tuple[int, int]:
        stats: Any = self._redis_client.info("stats")
        return stats["total_net_input_bytes"], stats["total_net_output_bytes"]

    def per(self, count: int) -> dict[str, float]:
        """Bytes sent to Redis and received from it, for each of ``count``."""
        moved = [now - start - idle for now, start, idle in zip(self._read(), self._start, self._idle, strict=True)]
        return {"sent_bytes": round(moved[0] / count, 1), "received_bytes": round(moved[1] / count, 1)}


@contextmanager
def counting_client(url: str) -> Iterator[tuple[redis.Redis, Tally]]:
    """A worker's redis_client, with its round trips counted."""
    tally = Tally()
    with redis_of(url) as redis_client:
        pool = redis_client.connection_pool
        pool.connection_class = CountingConnection
        pool.connection_kwargs["tally"] = tally
        yield redis_client, tally


def main() -> None:
    """Count everything and write one line of JSON for each case; tell by the exit status whether the promises hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="batch sizes (default: 1 8 32)")
    parser.add_argument("--fleets", type=int, nargs="+", default=[1, 2, 4], metavar="K", help="caches (default: 1 2 4)")
    parser.add_argument("--traces", type=int, default=192, metavar="N", help="traces of each case (default: 192)")
    options = parser.parse_args()
    rows: list[Row] = []
    kept = True
    with own_redis() as url:
        for batch in options.batches:
            for case, promised in _PROMISED.items():
                say(f"batches of {batch}: {case}")
                row = count_decisions(url, case, batch, options.traces)
                kept &= row["round_trips_min"] == row["round_trips_max"] == promised
                rows.append(row)
                emit(row)
        for workers in options.fleets:
            say(f"a fleet of {workers}")
            row = count_fleet(url, workers, options.traces)
            rows.append(row)
            emit(row)
    show_table(rows, _COLUMNS)
    if not kept:
        say("a batch took other than the round trips promised")
        sys.exit(1)


def count_decisions(url: str, case: Case, batch_size: int, count: int) -> Row:
    """Decide ``count`` traces in batches, with a worker that has just started."""
    keys = Keys(f"kp-{case}-{batch_size}")
    traces = _traces(count)
    with counting_client(url) as (redis_client, tally), redis_of(url) as control:
        novelty = None if case == "no_embedder" else NoveltyMeter(HashEmbedder(), _log(redis_client, keys), _WINDOW)
        decider = Decider(RedisLedger(redis_client, keys, _RECORD_TTL_MS, _LEASE_MS), Policy(), novelty, max_attempts=5)
        # Connects, loads the scripts and gives the log its first entry.
        decider.decide(_traces(1))
        if case == "redelivered":
            for batch in batches(traces, batch_size):
                decider.decide(batch)
        traffic = Traffic(control)
        round_trips = []
        for batch in batches(traces, batch_size):
            before = tally.round_trips
            decider.decide(batch)
            round_trips.append(tally.round_trips - before)
        return {
            "benchmark": "round_trips",
            "case": case,
            "batch": batch_size,
            "traces": count,
            "round_trips": round(sum(round_trips) / len(round_trips), 3),
            "round_trips_min": min(round_trips),
            "round_trips_max": max(round_trips),
            **traffic.per(count),
        }


def count_fleet(url: str, workers: int, count: int) -> Row:
    """Place ``count`` candidates, a batch at each worker in turn, and let all of them read to the end."""
    keys = Keys(f"kp-fleet-{workers}")
    first, *candidates = _candidates(count + 1)
    with ExitStack() as closing:
        control = closing.enter_context(redis_of(url))
        opened = [closing.enter_context(counting_client(url)) for _ in range(workers)]
        caches = [NoveltyCache(_log(redis_client, keys), _WINDOW, HashEmbedder.dimensions) for redis_client, _ in opened]
        # Connects them all, and gives the log its first entry.
        caches[0].place([first])
        for cache in caches:
            cache.catch_up()
        traffic = Traffic(control)
        before = sum(tally.round_trips for _, tally in opened)
        turns = list(zip(cycle(caches), batches(candidates, _FLEET_BATCH), strict=False))
        for cache, batch in turns:
            cache.place(batch)
        for cache in caches:
            cache.catch_up()
        moved = traffic.per(count)
        round_trips = sum(tally.round_trips for _, tally in opened) - before - workers
    return {
        "benchmark": "round_trips",
        "case": "fleet",
        "batch": _FLEET_BATCH,
        "workers": workers,
        "traces": count,
        "round_trips": round(round_trips / len(turns), 3),
        "sent_bytes": round(moved["sent_bytes"] / workers, 1),
        "received_bytes": round(moved["received_bytes"] / workers, 1),
        "fleet_received_bytes": moved["received_bytes"],
    }


def _traces(count: int) -> list[ReasoningTrace]:
    """So many samples, over and over, each as a trace of its own."""
    return as_new(list(islice(cycle(samples().traces), count)))


def _candidates(count: int) -> list[Candidate]:
    traces = _traces(count)
    vectors = HashEmbedder().embed([trace.embedding_text for trace in traces])
    return [Candidate(trace.id, trace.digest(), vector) for trace, vector in zip(traces, vectors, strict=True)]


def _log(redis_client: redis.Redis, keys: Keys) -> RedisLog:
    return RedisLog(redis_client, keys, HashEmbedder.space, _WINDOW, _RECORD_TTL_MS)


if __name__ == "__main__":
    main()
