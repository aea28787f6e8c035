"""What a submission may cost: the time and memory from its message to a checked trace with its digest, or to its refusal.

Every item of ``tests/support/costly.py`` fills every place, once as far as the limits let it and once as far as its bytes do;
the most costly are shown, and the real traces beside them. So are bodies that are packed, and four times as large as a trace.

- ``kb``: size of the body.
- ``ms``: processor time, the least of three tries: counting, parsing, checking, the digest.
- ``peak_mb``: the most memory that this takes at once beyond the bytes themselves, by tracemalloc.
- ``kept_mb``: memory of what is there in the end: the bytes, the parsed JSON and the trace; 0 if it is refused.
- ``held_mb``: resident memory of 96 of the legal shape that keeps the most, as a worker holds them that has as many in flight.
"""

import gc
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import psutil
from kombu.message import Message
from kp_scorer.broker.wire import PACKED_BY, TASK_NAME, arguments_in
from kp_scorer.decoding import Limits, decode_trace
from kp_scorer.errors import InvalidTrace
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, emit, real, say, show_table
from tests.support.costly import costly_submissions, oversized_bodies

_IN_FLIGHT: Final = 96
_MB: Final = 1_000_000
_COLUMNS: Final = {"name": "submission", "kb": "kB", "ms": "ms", "peak_mb": "peak MB", "kept_mb": "kept MB", "ends": "ends as"}


def main() -> None:
    options = arguments(__doc__, show=15).parse_args()
    limits = Limits()
    # As in a worker that is ready.
    gc.collect()
    gc.freeze()
    rows = [measured(name, sent, limits) for name, sent in _messages(limits)]
    for row in rows:
        emit(row)
    for cost in ("ms", "peak_mb"):
        show_table(sorted(rows, key=lambda row: -float(row[cost]))[: options.show], _COLUMNS)
    most = max(rows, key=lambda row: float(row["kept_mb"]))["name"]
    held_mb = next(resident_mb(sent, limits) for name, sent in _messages(limits) if name == most)
    emit({"benchmark": "validation", "name": most, "held_mb": held_mb})
    say(f"\n{_IN_FLIGHT} in flight of {most}: {held_mb:,.0f} MB")


def _messages(limits: Limits) -> Iterator[tuple[str, Message]]:
    if traces := real():
        largest = max(traces, key=lambda trace: len(trace.model_dump_json()))
        yield "the largest real trace", message(b"[[%s],{},null]" % largest.model_dump_json(exclude_none=True).encode())
    for name, raw in costly_submissions(limits):
        yield name, message(b"[[%s],{},null]" % raw)
    for name, body in oversized_bodies(limits):
        yield name, message(zlib.compress(body), {PACKED_BY: "gzip"})


def message(body: bytes, headers: dict[str, str] | None = None) -> Message:
    all_headers = {"task": TASK_NAME, **(headers or {})}
    return Message(body=body, content_type="application/json", headers=all_headers, delivery_info={})


def measured(name: str, sent: Message, limits: Limits) -> Row:
    """Decode a submission as a worker does, three times for its time and once for its memory."""
    tracemalloc.start()
    ends, decoded = "trace", None
    try:
        decoded = decode(sent, limits)
    except InvalidTrace as error:
        ends = str(error)[:60]
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "benchmark": "validation",
        "name": name,
        "kb": round(len(sent.body) / 1_000),
        "ms": round(min(_seconds(sent, limits) for _ in range(3)) * 1_000, 1),
        "peak_mb": round(peak_bytes / _MB, 1),
        "kept_mb": round((len(sent.body) + kept_bytes) / _MB, 1) if decoded else 0.0,
        "ends": ends,
    }


def decode(sent: Message, limits: Limits) -> tuple[object, ReasoningTrace]:
    """From a message to parsed JSON, a trace and its digest, by the steps that a worker takes.

    Raises:
        InvalidTrace: it is refused.
    """
    (payload,), _ = arguments_in(sent, limits)
    trace = decode_trace(payload, limits)
    trace.digest()
    return payload, trace


def resident_mb(sent: Message, limits: Limits) -> float:
    """Resident MB of as many copies of a submission as a worker has in flight, each with its own parts."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    bodies = (sent.body.replace(b"kp:trace:maximal", b"kp:trace:%d" % number, 1) for number in range(_IN_FLIGHT))
    decoded: list[object] = []
    decoded.extend(decode(message(body), limits) for body in bodies)
    return round(float(process.memory_info().rss - before) / _MB, 1)


def _seconds(sent: Message, limits: Limits) -> float:
    started = time.thread_time()
    with suppress(InvalidTrace):
        decode(sent, limits)
    return time.thread_time() - started


if __name__ == "__main__":
    main()
