"""What a submission may cost: the time and memory from its bytes to a checked trace with its digest, or to its refusal.

Every item of ``tests/support/costly.py`` fills every place, once as far as the limits let it and once as far as its bytes do;
the most costly are shown, and the real traces beside them.

- ``kb``: size of the submission.
- ``ms``: processor time, the least of three tries: counting, parsing, checking, the digest.
- ``peak_mb``: the most memory that this takes at once beyond the bytes themselves, by tracemalloc.
- ``kept_mb``: memory of what is there in the end: the bytes, the parsed JSON and the trace; 0 if it is refused.
- ``held_mb``: resident memory of 96 of the legal shape that keeps the most, as a worker holds them that has as many in hand.
"""

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import psutil
from kp_scorer.decoding import Limits, check_values, decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, emit, real, say, show_table
from tests.support.costly import costly_submissions

_IN_HAND: Final = 96
_MB: Final = 1_000_000
_COLUMNS: Final = {"name": "submission", "kb": "kB", "ms": "ms", "peak_mb": "peak MB", "kept_mb": "kept MB", "ends": "ends as"}


def main() -> None:
    """Measure every shape and write a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", type=int, default=15, metavar="N", help="how many of the most costly to show (default: 15)")
    options = parser.parse_args()
    limits = Limits()
    # As in a worker that is ready.
    gc.collect()
    gc.freeze()
    rows = [measured(name, raw, limits) for name, raw in _submissions(limits)]
    for row in rows:
        emit(row)
    for cost in ("ms", "peak_mb"):
        show_table(sorted(rows, key=lambda row: -float(row[cost]))[: options.show], _COLUMNS)
    most = max(rows, key=lambda row: float(row["kept_mb"]))["name"]
    held_mb = next(held(raw, limits) for name, raw in _submissions(limits) if name == most)
    emit({"benchmark": "validation", "name": most, "held_mb": held_mb})
    say(f"\n{_IN_HAND} in hand of {most}: {held_mb:,.0f} MB")


def _submissions(limits: Limits) -> Iterator[tuple[str, bytes]]:
    if found := real():
        largest = max(found.traces, key=lambda trace: len(trace.model_dump_json()))
        yield "the largest real trace", largest.model_dump_json(exclude_none=True).encode()
    yield from costly_submissions(limits)


def measured(name: str, raw: bytes, limits: Limits) -> Row:
    """Decode a submission as a worker does, three times for its time and once for its memory."""
    tracemalloc.start()
    ends, kept = "trace", None
    try:
        kept = decode(raw, limits)
    except InvalidTrace as error:
        ends = str(error)[:60]
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "benchmark": "validation",
        "name": name,
        "kb": round(len(raw) / 1_000),
        "ms": round(min(_seconds(raw, limits) for _ in range(3)) * 1_000, 1),
        "peak_mb": round(peak_bytes / _MB, 1),
        "kept_mb": round((len(raw) + kept_bytes) / _MB, 1) if kept else 0.0,
        "ends": ends,
    }


def decode(raw: bytes, limits: Limits) -> tuple[object, ReasoningTrace]:
    """From bytes to parsed JSON, a trace and its digest, by the steps that a worker takes.

    Raises:
        InvalidTrace: it is refused.
    """
    check_values(raw, limits.values)
    payload = json.loads(raw.decode())
    trace = decode_trace(payload, limits)
    trace.digest()
    return payload, trace


def held(raw: bytes, limits: Limits) -> float:
    """Resident MB of as many copies of a submission as a worker has in hand, each with its own parts."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    kept = []
    for number in range(_IN_HAND):
        body = raw.replace(b"kp:trace:maximal", b"kp:trace:%d" % number, 1)
        kept.append((body, *decode(body, limits)))
    return round(float(process.memory_info().rss - before) / _MB, 1)


def _seconds(raw: bytes, limits: Limits) -> float:
    started = time.thread_time()
    with suppress(InvalidTrace):
        decode(raw, limits)
    return time.thread_time() - started


if __name__ == "__main__":
    main()
