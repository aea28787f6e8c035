"""2,000 submissions through a real broker and one worker to published decisions, beside the bare engine and the reference.

They are submitted in portions. Each portion is put on the queue while the worker is held, then decided at full speed, from the
moment when the worker goes on to the last decision's arrival on its queue. The same texts then go through the bare engine in
this process, in batches as the worker makes them, and some of them through the reference engine (where node is installed), so
that a machine that slows down for a minute slows all.

- ``texts``: of the whole length, cut to their first 1,000 characters, or to the objective alone.
- ``traces_per_s``: submissions decided and published a second; the median of the portions.
- ``engine_traces_per_s``, ``of_engine``: the bare engine's rate on the same texts, and the median share of it.
- ``reference_traces_per_s``, ``ratio``: the reference engine's rate, and the median ratio to it.
- ``cpu_outside_ms``: processor time of the worker for a trace, less that of the bare engine.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import psutil
from kp_scorer.embedding import Embedder
from kp_scorer.settings import WorkerSettings
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, batches, emit, real_embedder, say, show_table
from tests.benchmarks.load import Bench, bench, cut, submit, traces
from tests.benchmarks.reference_engine import ReferenceEngine, node_is_there, reference_engine

_BATCH: Final = WorkerSettings().batch_size
_REFERENCE_SHARE: Final = 5
"""The reference gets one in so many texts: it is slow, and its rate is steady."""

_CHARS: Final = {"short": 0, "medium": 1_000, "long": 10**9}
"""Characters of a text at most: only the objective, its beginning, or all of it."""

_COLUMNS: Final = {
    "texts": "texts",
    "traces": "traces",
    "traces_per_s": "traces/s",
    "engine_traces_per_s": "engine/s",
    "of_engine": "of engine",
    "reference_traces_per_s": "reference/s",
    "ratio": "ratio",
    "cpu_outside_ms": "CPU outside ms",
    "engine": "engine",
}


class Portion(NamedTuple):
    """Traces a second of the worker, of the bare engine and of the reference (0 without), and milliseconds of CPU a trace."""

    rate: float
    engine_rate: float
    reference_rate: float
    cpu_ms: float
    engine_cpu_ms: float


def main() -> None:
    """Measure and write one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=2_000, metavar="N", help="submissions (default: 2000)")
    parser.add_argument("--texts", choices=list(_CHARS), default="long", help="how long the texts are (default: long)")
    parser.add_argument("--portion", type=int, default=200, metavar="N", help="submissions at a time (default: 200)")
    options = parser.parse_args()
    embedder = real_embedder()
    with ExitStack() as stack:
        reference = stack.enter_context(reference_engine()) if node_is_there() else None
        found = stack.enter_context(bench(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        items = [cut(trace, _CHARS[options.texts]) for trace in traces(options.traces)]
        engine_of(embedder, reference, items[:96])
        portions = []
        for portion in batches(items, options.portion):
            portions.append(measure(found, embedder, reference, portion))
            say(f"{len(portions)}: {portions[-1].rate:.1f}/s, engine {portions[-1].engine_rate:.1f}/s")
    row = {"texts": options.texts, **summary(portions, options.traces, embedder)}
    emit(row)
    show_table([row], _COLUMNS)


def measure(found: Bench, embedder: Embedder, reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]) -> Portion:
    """Decide one portion, then embed its texts with the engines."""
    before = len(found.published.at)
    submit(found, items)
    started, cpu_s = time.time(), found.cpu_s()
    found.published.wait_for(before + len(items))
    cpu_s = found.cpu_s() - cpu_s
    elapsed_s = max(found.published.at[trace.id] for trace in items) - started
    engine_rate, engine_cpu_ms, reference_rate = engine_of(embedder, reference, items)
    return Portion(len(items) / elapsed_s, engine_rate, reference_rate, cpu_s / len(items) * 1_000, engine_cpu_ms)


def engine_of(
    embedder: Embedder, reference: ReferenceEngine | None, items: Sequence[ReasoningTrace]
) -> tuple[float, float, float]:
    """Traces a second and milliseconds of CPU a trace of the bare engine, and traces a second of the reference."""
    texts = [trace.embedding_text for trace in items]
    process = psutil.Process()
    cpu_s, started = sum(process.cpu_times()[:2]), time.perf_counter()
    for batch in batches(texts, _BATCH):
        embedder.embed(batch)
    elapsed_s, cpu_s = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu_s
    some = texts[::_REFERENCE_SHARE]
    reference_rate = len(some) / reference.embed(some).seconds if reference else 0.0
    return len(texts) / elapsed_s, cpu_s / len(texts) * 1_000, reference_rate


def summary(portions: Sequence[Portion], count: int, embedder: Embedder) -> Row:
    """Summarise the portions."""
    row: Row = {
        "benchmark": "end_to_end",
        "traces": count,
        "traces_per_s": round(median(one.rate for one in portions), 2),
        "engine_traces_per_s": round(median(one.engine_rate for one in portions), 2),
        "of_engine": round(median(one.rate / one.engine_rate for one in portions), 3),
        "cpu_outside_ms": round(median(one.cpu_ms - one.engine_cpu_ms for one in portions), 2),
        "engine": embedder.engine,
    }
    if all(one.reference_rate for one in portions):
        row["reference_traces_per_s"] = round(median(one.reference_rate for one in portions), 2)
        row["ratio"] = round(median(one.rate / one.reference_rate for one in portions), 3)
    return row


if __name__ == "__main__":
    main()
