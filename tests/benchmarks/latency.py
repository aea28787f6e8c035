"""From submitting a trace to its published decision, at half the load that one worker can bear.

That load is measured first: a portion of traces, put on the queue while the worker is paused. Then traces are submitted at
half that rate, evenly spaced, and once more at random moments (exponential gaps, as of many independent agents). The clock runs
from before ``submit`` is called until the decision is read from its results queue; client, reader and worker share the machine.

- ``p50_ms``, ``p95_ms``, ``p99_ms``: of the whole way; ``within_100_ms``: the share that took no longer, which is what the
  KnowledgePulse design allows a score.
- ``reference_ms``: what the reference engine takes to embed one text, the median of some before and some after (where it
  can run); ``p50_of_reference`` and so on: the whole way's share of that.
- Medians of its parts: ``submit_ms``, the client's call; ``queue_ms``, from there until the batch begins, in the broker and in
  the worker; ``embed_ms``; ``redis_ms``, looking up records and placing vectors in the log; ``publish_ms``, from the decision
  until it is read from its queue: committing and publishing it. Parts are those of the trace's batch.
"""

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime
from statistics import fmean, median, quantiles
from typing import Any, Final

from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, report, say
from tests.benchmarks.load import Bench, open_bench, traces
from tests.benchmarks.reference_engine import ReferenceEngine, is_available, reference_engine

_PORTION: Final = 200
_REFERENCE_TEXTS: Final = 60
_ALLOWED_MS: Final = 100


def main() -> None:
    parser = arguments(__doc__, traces=600)
    parser.add_argument("--load", type=float, default=0.5, metavar="X", help="share of what the worker can bear (default: 0.5)")
    report("latency", rows_of(parser.parse_args()))


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    with ExitStack() as stack:
        reference = stack.enter_context(reference_engine()) if is_available() else None
        bench = stack.enter_context(open_bench())
        rate = bench.decide(traces(_PORTION)).per_s * options.load
        say(f"submitting {rate:.1f} a second")
        shuffle = random.Random(1)
        for arrivals in ("even", "random"):
            gaps = [1 / rate if arrivals == "even" else shuffle.expovariate(rate) for _ in range(options.traces)]
            row: Row = {"arrivals": arrivals, "load": options.load, "traces_per_s": rate}
            yield row | measure(bench, reference, traces(options.traces), gaps)


def measure(bench: Bench, reference: ReferenceEngine | None, items: Sequence[ReasoningTrace], gaps: Sequence[float]) -> Row:
    """Submit traces at the given gaps in seconds and see what each one's way took."""
    reference_ms = _reference_ms(reference, items)
    submitted = bench.submit_at(items, gaps)
    reference_ms += _reference_ms(reference, items)
    ways = [_parts(bench, trace_id, *times) for trace_id, times in submitted.items()]
    cuts = quantiles((way["total_ms"] for way in ways), n=100, method="inclusive")
    row: Row = {"traces": len(items), **{f"p{at}_ms": cuts[at - 1] for at in (50, 95, 99)}}
    row["within_100_ms"] = fmean(way["total_ms"] <= _ALLOWED_MS for way in ways)
    if reference_ms:
        row["reference_ms"] = median(reference_ms)
        row |= {f"p{at}_of_reference": cuts[at - 1] / median(reference_ms) for at in (50, 95, 99)}
    parts = [name for name in ways[0] if name != "total_ms"]
    return row | {name: median(way[name] for way in ways) for name in parts}


def _reference_ms(reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]) -> list[float]:
    """What the reference takes to embed some of the traces, each by itself; nothing without it."""
    if reference is None:
        return []
    return [reference.embed([trace.embedding_text]).seconds * 1_000 for trace in items[:_REFERENCE_TEXTS]]


def _parts(bench: Bench, trace_id: str, started: float, sent: float) -> dict[str, float]:
    """Milliseconds of each part of a trace's way."""
    decision: dict[str, Any] = json.loads(bench.published.body(trace_id))
    timings, decided = decision["timings"], datetime.fromisoformat(decision["decided_at"]).timestamp()
    arrived = bench.published.at[trace_id]
    redis_ms = timings["look_up_ms"] + timings["place_ms"]
    return {
        "total_ms": (arrived - started) * 1_000,
        "submit_ms": (sent - started) * 1_000,
        "queue_ms": (decided - sent) * 1_000 - redis_ms - timings["embed_ms"],
        "embed_ms": timings["embed_ms"],
        "redis_ms": redis_ms,
        "publish_ms": (arrived - decided) * 1_000,
    }


if __name__ == "__main__":
    main()
