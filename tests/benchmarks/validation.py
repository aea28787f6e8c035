"""Measures the time and memory that a submission takes, from its message to a checked trace with its digest, or to its refusal.

Every item of ``tests/support/costly.py`` fills every place, once as far as the limits allow and once up to the largest body.
The most costly are shown, together with the largest real trace, and with packed bodies that are four times as large as a trace.

A second table shows the texts that are the most costly to tokenize, by any recipe; ``first_ms`` is the time of the first try.

- ``kb``: the size of the body.
- ``ms``: the processor time to count, parse, check and digest, the least of three tries.
- ``peak_mb``: the most memory that this takes at once beyond the body itself, by tracemalloc.
- ``kept_mb``: the memory that remains for the body, the parsed JSON and the trace; 0 if the submission is refused.
- ``held_mb``: the resident memory of 96 copies of the accepted submission that keeps the most, as in a worker with that many
  in flight.
"""

import gc
import resource
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import psutil
from kombu.message import Message
from kp_scorer.broker.headers import PACKED_BY
from kp_scorer.broker.wire import TASK_NAME, arguments_in
from kp_scorer.decoding import decode_trace
from kp_scorer.embedding.embedder import RECIPES
from kp_scorer.embedding.tokenizer import Tokens
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import MB, Row, arguments, default_tokens, emit, real, report, seconds_of, show_table
from tests.support.calls import traced_memory
from tests.support.costly import COSTLY_TEXTS, costly_submissions, oversized_bodies

_IN_FLIGHT: Final = 96


def main() -> None:
    show = arguments(__doc__, show=15).parse_args().show
    limits = Limits()
    # A ready worker has frozen its objects, too.
    gc.collect()
    gc.freeze()
    rows = [measured(name, sent, limits) for name, sent in _messages(limits)]
    show_most(rows, ("ms", "peak_mb"), show)
    costs = partial(costs_of_text, default_tokens())
    show_most([costs(name, text) for name, text in COSTLY_TEXTS.items()], ("first_ms", "ms", "peak_mb"), show)
    most = max(rows, key=lambda row: float(row["kept_mb"]))["name"]
    held_mb = next(resident_mb(sent, limits) for name, sent in _messages(limits) if name == most)
    report("validation", [{"name": most, "in_flight": _IN_FLIGHT, "held_mb": held_mb}])


def show_most(rows: Sequence[Row], costs: Sequence[str], count: int) -> None:
    """Write all rows to stdout, and for each cost a table of the most costly ones to stderr."""
    for row in rows:
        emit({"benchmark": "validation", **row})
    for cost in costs:
        show_table(sorted(rows, key=lambda row: -float(row[cost]))[:count])


def _messages(limits: Limits) -> Iterator[tuple[str, Message]]:
    if traces := real():
        largest = max(traces, key=lambda trace: len(trace.model_dump_json()))
        yield "the largest real trace", message(b"[[%s],{},null]" % largest.model_dump_json(exclude_none=True).encode())
    for name, raw in costly_submissions(limits):
        yield name, message(b"[[%s],{},null]" % raw)
    for name, body in oversized_bodies(limits):
        yield name, message(zlib.compress(body), {PACKED_BY: "gzip"})


def costs_of_text(tokens: Tokens, name: str, text: str) -> Row:
    """Measure the cost of tokenizing a text by the recipe for which it is highest; the memory of the text does not count."""
    grown_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = []
    for part in (part for recipe in RECIPES.values() for part in recipe.parts):
        tokenize = partial(tokens.rows, [text], part.max_tokens, keep_end=part.keeps_end)
        seconds = [seconds_of(tokenize, time.thread_time) for _ in range(4)]
        with traced_memory() as memory:
            tokenize()
        costs.append((seconds[0], min(seconds[1:]), memory.peak_bytes))
    grown_bytes = 1_024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_before)
    first_s, least_s, peak_bytes = map(max, zip(*costs, strict=True))
    return {
        "name": name,
        "kb": round(len(text.encode()) / 1_000),
        "first_ms": round(first_s * 1_000, 1),
        "ms": round(least_s * 1_000, 1),
        "peak_mb": round(max(peak_bytes, grown_bytes) / MB, 1),
    }


def message(body: bytes, headers: dict[str, str] | None = None) -> Message:
    all_headers = {"task": TASK_NAME, **(headers or {})}
    return Message(body=body, content_type="application/json", headers=all_headers, delivery_info={})


def measured(name: str, sent: Message, limits: Limits) -> Row:
    """Decode a submission as a worker does, three times for its time and once for its memory."""
    with traced_memory() as memory:
        decoded = decode(sent, limits)
    return {
        "name": name,
        "kb": round(len(sent.body) / 1_000),
        "ms": round(min(seconds_of(partial(decode, sent, limits), time.thread_time) for _ in range(3)) * 1_000, 1),
        "peak_mb": round(memory.peak_bytes / MB, 1),
        "kept_mb": round((len(sent.body) + memory.held_bytes) / MB, 1) if isinstance(decoded, tuple) else 0.0,
        "ends": "trace" if isinstance(decoded, tuple) else decoded,
    }


def decode(sent: Message, limits: Limits) -> tuple[object, ReasoningTrace] | str:
    """Decode a message as a worker does; return the parsed JSON and the trace with its digest, or why it is refused."""
    try:
        (payload,), _ = arguments_in(sent, limits)
        trace = decode_trace(payload, limits)
    except InvalidTrace as error:
        return str(error)[:60]
    trace.digest()
    return payload, trace


def resident_mb(sent: Message, limits: Limits) -> float:
    """Return the resident MB of as many decoded copies of a submission as a worker may have in flight, which share nothing."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    bodies = (sent.body.replace(b"kp:trace:maximal", b"kp:trace:%d" % number, 1) for number in range(_IN_FLIGHT))
    decoded: list[object] = []
    decoded.extend(decode(message(body), limits) for body in bodies)
    return round(float(process.memory_info().rss - before) / MB, 1)


if __name__ == "__main__":
    main()
