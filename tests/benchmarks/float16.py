"""What keeping vectors as float16 changes: novelty, score, outcome, and the memory that Redis needs.

The real traces where they lie beside the checkout, else the shipped samples, are embedded once and then decided in order,
from an empty log, with a float32 log and with a float16 one. Whatever differs comes from the rounding alone.

- ``novelty_max``, ``novelty_mean``, ``score_max``, ``score_mean``: absolute differences between the two decisions of a trace.
- ``outcomes_changed``: traces accepted with one and rejected with the other, at ``--threshold``.
- ``near_some_threshold``: traces whose two scores lie on different sides of some threshold 0.01, 0.02, ... 0.99.
- ``nearest_changed``: traces whose nearest earlier trace is another one.
- ``float32_bytes``, ``float16_bytes``: Redis' memory for 1,000 entries, from the log that was written.
"""

import argparse
from collections.abc import Sequence
from typing import Final

import numpy as np
import redis
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.embedding import TRACE
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.scoring import Policy
from kp_scorer.settings import LedgerSettings, NoveltySettings, VectorType, WorkerSettings
from kp_scorer.store import RedisLedger, RedisLog
from kp_scorer.store.keys import Keys
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, batches, emit, own_redis, real, real_embedder, redis_of, samples, say, show_table

_BATCH: Final = 8
_RECORD_TTL_MS: Final = int(LedgerSettings().ttl_s * 1_000)
_LEASE_MS: Final = int(WorkerSettings().decision_timeout_s * 1_000)

_COLUMNS: Final = {
    "workload": "texts",
    "traces": "traces",
    "novelty_max": "novelty max",
    "novelty_mean": "mean",
    "score_max": "score max",
    "score_mean": "mean",
    "outcomes_changed": "outcomes changed",
    "near_some_threshold": "at any threshold",
    "nearest_changed": "nearest changed",
    "float32_bytes": "float32 B/1,000",
    "float16_bytes": "float16 B/1,000",
}


class Embedded:
    """An embedder that embeds each text once, ahead of time, so that both logs get the very same vectors."""

    name = "embedded ahead"
    engine = "none"
    space = "benchmark"
    recipe = TRACE
    tokens_embedded = 0

    def __init__(self, traces: Sequence[ReasoningTrace]) -> None:
        embedder = real_embedder()
        self.dimensions = embedder.dimensions
        self._vectors: dict[str, Vectors] = {}
        texts = sorted({trace.embedding_text for trace in traces}, key=len)
        for batch in batches(texts, _BATCH):
            self._vectors.update(zip(batch, embedder.embed(batch), strict=True))
            if len(self._vectors) % (10 * _BATCH) == 0:
                say(f"embedded {len(self._vectors)} of {len(texts)}")

    def embed(self, texts: Sequence[str]) -> Vectors:
        return np.stack([self._vectors[text] for text in texts])


def main() -> None:
    """Decide the traces with both logs and write the differences as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, metavar="N", help="only the first N (default: all)")
    parser.add_argument("--threshold", type=float, default=0.75, metavar="X", help="accept from this score (default: 0.75)")
    options = parser.parse_args()
    workload = real(options.traces) or samples(options.traces)
    embedder = Embedded(workload.traces)
    policy = Policy(threshold=options.threshold)
    with own_redis() as url, redis_of(url) as redis_client:
        exact, exact_bytes = decide_all(redis_client, workload.traces, embedder, policy, "float32")
        rounded, rounded_bytes = decide_all(redis_client, workload.traces, embedder, policy, "float16")
    row: Row = {
        "benchmark": "float16",
        "workload": workload.name,
        "traces": len(workload.traces),
        "threshold": options.threshold,
        **differences(exact, rounded),
        "float32_bytes": exact_bytes,
        "float16_bytes": rounded_bytes,
    }
    emit(row)
    show_table([row], _COLUMNS)


def decide_all(
    redis_client: redis.Redis, traces: Sequence[ReasoningTrace], embedder: Embedded, policy: Policy, vector_type: VectorType
) -> tuple[list[Decision], int]:
    """Decide the traces in order from an empty log; return the decisions, and the log's bytes for 1,000 entries."""
    # Its own prefix, so that the second log's traces are not redeliveries of the first's.
    keys = Keys(f"kp-{vector_type}")
    window = NoveltySettings().window()
    log = RedisLog(redis_client, keys, embedder.space, window, _RECORD_TTL_MS, vector_type)
    meter = NoveltyMeter(embedder, log, window)
    decider = Decider(RedisLedger(redis_client, keys, _RECORD_TTL_MS, _LEASE_MS), policy, meter, max_attempts=5)
    decisions = []
    for batch in batches(traces, _BATCH):
        for decided in decider.decide(batch):
            assert isinstance(decided, Decision)
            decisions.append(decided)
    say(f"{vector_type}: decided {len(decisions)}")
    info = log.info()
    assert info.entries == len(traces)
    return decisions, round(info.bytes * 1_000 / info.entries)


def differences(exact: Sequence[Decision], rounded: Sequence[Decision]) -> Row:
    """Compare the two decisions of each trace."""
    pairs = list(zip(exact, rounded, strict=True))
    novelty = [abs(one.dimensions.novelty - other.dimensions.novelty) for one, other in pairs]
    score = [abs(one.score - other.score) for one, other in pairs]
    hundredths = [hundredth / 100 for hundredth in range(1, 100)]
    nearest = [
        (one.novelty.nearest and one.novelty.nearest.trace_id, other.novelty.nearest and other.novelty.nearest.trace_id)
        for one, other in pairs
    ]
    return {
        "novelty_max": max(novelty),
        "novelty_mean": sum(novelty) / len(novelty),
        "score_max": max(score),
        "score_mean": sum(score) / len(score),
        "outcomes_changed": sum(one.outcome != other.outcome for one, other in pairs),
        "near_some_threshold": sum(
            any((one.score >= threshold) != (other.score >= threshold) for threshold in hundredths) for one, other in pairs
        ),
        "nearest_changed": sum(one != other for one, other in nearest),
    }


if __name__ == "__main__":
    main()
