"""From submitting a trace to its published decision, at half the load that one worker can bear.

What it can bear is measured first: a portion of traces, put on the queue while the worker is held. Then traces are submitted
at half that rate, evenly spaced, and once more at random moments (exponential gaps, as of many agents that know nothing of
each other). The clock runs from before ``submit`` is called until the decision is taken off its results queue; submitting,
taking and the worker share the machine.

- ``p50_ms``, ``p95_ms``, ``p99_ms``: of the whole way.
- ``reference_ms``: what the reference engine takes to embed one text, the median of some before and some after (where node is
  installed); ``p50_of_reference``, ``p99_of_reference``: the whole way's share of that.
- Medians of its parts: ``submit_ms``, the client's call; ``queue_ms``, from there until the batch is begun, in the broker and
  in the worker; ``embed_ms``; ``redis_ms``, looking up records and placing vectors in the log; ``publish_ms``, from the
  decision being made until it is off its queue: committing and publishing it. Parts are those of the trace's batch.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, emit, say, show_table
from tests.benchmarks.load import Bench, bench, submit, traces
from tests.benchmarks.reference_engine import ReferenceEngine, node_is_there, reference_engine

_PORTION: Final = 200
_REFERENCE_TEXTS: Final = 60

_COLUMNS: Final = {
    "arrivals": "arrivals",
    "load": "load",
    "traces_per_s": "traces/s",
    "p50_ms": "p50 ms",
    "p95_ms": "p95",
    "p99_ms": "p99",
    "reference_ms": "reference ms",
    "p50_of_reference": "p50 of it",
    "p99_of_reference": "p99 of it",
    "submit_ms": "submit",
    "queue_ms": "queue",
    "embed_ms": "embed",
    "redis_ms": "Redis",
    "publish_ms": "publish",
}


def main() -> None:
    """Measure both kinds of arrivals and write one line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=600, metavar="N", help="submissions of each kind (default: 600)")
    parser.add_argument("--load", type=float, default=0.5, metavar="X", help="share of what the worker can bear (default: 0.5)")
    options = parser.parse_args()
    rows: list[Row] = []
    with ExitStack() as stack:
        reference = stack.enter_context(reference_engine()) if node_is_there() else None
        found = stack.enter_context(bench(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        rate = capacity(found) * options.load
        say(f"submitting {rate:.1f} a second")
        shuffle = random.Random(1)
        for arrivals in ("even", "random"):
            gaps = [1 / rate if arrivals == "even" else shuffle.expovariate(rate) for _ in range(options.traces)]
            row: Row = {"benchmark": "latency", "arrivals": arrivals, "load": options.load, "traces_per_s": round(rate, 2)}
            rows.append(row | measure(found, reference, traces(options.traces), gaps))
            emit(rows[-1])
    show_table(rows, _COLUMNS)


def capacity(found: Bench) -> float:
    """Traces a second that the worker decides when there are always some waiting."""
    items = traces(_PORTION)
    before = len(found.published.at)
    submit(found, items)
    started = time.perf_counter()
    found.published.wait_for(before + len(items))
    return len(items) / (time.perf_counter() - started)


def measure(found: Bench, reference: ReferenceEngine | None, items: Sequence[ReasoningTrace], gaps: Sequence[float]) -> Row:
    """Submit traces at the given gaps in seconds and see what each one's way took."""
    reference_ms = milliseconds_of(reference, items)
    before = len(found.published.at)
    begun: dict[str, float] = {}
    sent: dict[str, float] = {}
    due = time.time()
    for trace, gap in zip(items, gaps, strict=True):
        due += gap
        time.sleep(max(0.0, due - time.time()))
        begun[trace.id] = time.time()
        found.client.submit(trace)
        sent[trace.id] = time.time()
    found.published.wait_for(before + len(items))
    reference_ms += milliseconds_of(reference, items)
    ways = [parts(found, trace.id, begun[trace.id], sent[trace.id]) for trace in items]
    total = quantiles((way["total_ms"] for way in ways), n=100, method="inclusive")
    row: Row = {
        "traces": len(items),
        "p50_ms": round(total[49], 2),
        "p95_ms": round(total[94], 2),
        "p99_ms": round(total[98], 2),
    }
    if reference_ms:
        row["reference_ms"] = round(median(reference_ms), 2)
        row["p50_of_reference"] = round(total[49] / median(reference_ms), 3)
        row["p99_of_reference"] = round(total[98] / median(reference_ms), 3)
    for name in ("submit_ms", "queue_ms", "embed_ms", "redis_ms", "publish_ms"):
        row[name] = round(median(way[name] for way in ways), 2)
    return row


def milliseconds_of(reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]) -> list[float]:
    """What the reference takes to embed some of the traces, each by itself; nothing without it."""
    if reference is None:
        return []
    return [reference.embed([trace.embedding_text]).seconds * 1_000 for trace in items[:_REFERENCE_TEXTS]]


def parts(found: Bench, trace_id: str, begun: float, sent: float) -> dict[str, float]:
    """Milliseconds of each part of a trace's way."""
    decision: dict[str, Any] = json.loads(found.published.body(trace_id))
    timings, decided = decision["timings"], datetime.fromisoformat(decision["decided_at"]).timestamp()
    total_ms = (found.published.at[trace_id] - begun) * 1_000
    submit_ms = (sent - begun) * 1_000
    redis_ms = timings["look_up_ms"] + timings["place_ms"]
    publish_ms = (found.published.at[trace_id] - decided) * 1_000
    return {
        "total_ms": total_ms,
        "submit_ms": submit_ms,
        "queue_ms": total_ms - submit_ms - redis_ms - timings["embed_ms"] - publish_ms,
        "embed_ms": timings["embed_ms"],
        "redis_ms": redis_ms,
        "publish_ms": publish_ms,
    }


if __name__ == "__main__":
    main()
