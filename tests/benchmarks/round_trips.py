"""Counts a worker's round trips to Redis for a batch, and their bytes. It times nothing, and needs no model.

Batches of samples are decided as new traces and as redelivered ones.

- ``round_trips_min``, ``round_trips_max``: the fewest and the most changes from writing to reading on the worker's connection
  for a batch. Connecting and loading the scripts, once per connection, are left out.
- ``sent_bytes``, ``received_bytes``: the bytes per trace, as the worker sees them, by Redis' own count of network traffic.
"""

from collections.abc import Sequence
from itertools import cycle, islice, product
from typing import Any, Final

import numpy as np
import redis
from kp_scorer.decider import Decider
from kp_scorer.embedding.embedder import TRACE, Embedder, Vectors
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.scoring import Policy
from kp_scorer.settings.sections import LedgerSettings, NoveltySettings, WorkerSettings
from kp_scorer.store.keys import Keys
from kp_scorer.store.ledger import RedisLedger
from kp_scorer.store.novelty_log import RedisLog

from tests.benchmarks.common import Row, arguments, as_new, batches, own_redis, redis_of, report, samples, unit_vectors

_RECORD_TTL_MS: Final = int(LedgerSettings().ttl_s * 1_000)
_LEASE_MS: Final = int(WorkerSettings.stalled_after_s * 1_000)


class RandomEmbedder(Embedder):
    """An embedder that returns random unit vectors, as large as the default model's."""

    name = "random"
    space = "benchmark"
    dimensions = 384
    recipe = TRACE

    def embed(self, texts: Sequence[str]) -> Vectors:
        return unit_vectors(np.random.default_rng(), len(texts), self.dimensions)


class CountingConnection(redis.Connection):
    """A connection that counts how often reading follows writing."""

    round_trips = 0
    _unanswered = False

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        super().send_packed_command(command, check_health)  # type: ignore[no-untyped-call]
        self._unanswered = True

    def read_response(self, *args: Any, **options: Any) -> Any:
        # Count for all connections: the worker has one.
        CountingConnection.round_trips += self._unanswered
        self._unanswered = False
        return super().read_response(*args, **options)


def random_decider(redis_client: redis.Redis, keys: Keys) -> Decider:
    """Return a decider like a worker's, but with random vectors."""
    window = NoveltySettings().window()
    log = RedisLog(redis_client, keys, RandomEmbedder.space, window, _RECORD_TTL_MS)
    ledger = RedisLedger(redis_client, keys, _RECORD_TTL_MS, _LEASE_MS)
    return Decider(ledger, Policy(), NoveltyMeter(RandomEmbedder(), log, window), max_attempts=5)


def main() -> None:
    options = arguments(__doc__, traces=192, batches=[1, 8, 32]).parse_args()
    cases = product(options.batches, ("new", "redelivered"))
    with own_redis() as url:
        report("round_trips", (_count(url, case, size, options.traces) for size, case in cases))


def _count(url: str, case: str, size: int, count: int) -> Row:
    """Decide ``count`` traces in batches, as a worker that has just started; count its round trips and bytes."""
    first, *items = as_new(list(islice(cycle(samples()), count + 1)))
    with redis_of(url) as redis_client, redis_of(url) as control:
        redis_client.connection_pool.connection_class = CountingConnection
        decider = random_decider(redis_client, Keys(f"kp-{case}-{size}"))
        # This connects, loads the scripts and gives the log its first entry.
        decider.decide([first])
        if case == "redelivered":
            for batch in batches(items, size):
                decider.decide(batch)
        sent_bytes, received_bytes = _traffic(control)
        round_trips = []
        for batch in batches(items, size):
            before = CountingConnection.round_trips
            decider.decide(batch)
            round_trips.append(CountingConnection.round_trips - before)
        sent_after, received_after = _traffic(control)
    return {
        "case": case,
        "batch": size,
        "round_trips_min": min(round_trips),
        "round_trips_max": max(round_trips),
        "sent_bytes": (sent_after - sent_bytes) / count,
        "received_bytes": (received_after - received_bytes) / count,
    }


def _traffic(redis_client: redis.Redis) -> tuple[int, int]:
    """Return the bytes that Redis has received and sent; asking for them adds a few, which hardly matter."""
    stats = redis_client.info("stats")
    return stats["total_net_input_bytes"], stats["total_net_output_bytes"]


if __name__ == "__main__":
    main()
