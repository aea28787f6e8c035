"""What a submission may cost: the time and memory from its message to a checked trace with its digest, or to its refusal.

Every item of ``tests/support/costly.py`` fills every place, once as far as the limits let it and once as far as its bytes do;
the most costly are shown, and the real traces beside them. So are bodies that are packed, and four times as large as a trace.

Then come the texts that are the most costly to make tokens of, by any recipe, of words of all lengths and kinds of characters;
their ``first_ms`` is the time of a first try.

- ``kb``: size of the body.
- ``ms``: processor time, the least of three tries: counting, parsing, checking, the digest.
- ``peak_mb``: the most memory that this takes at once beyond the bytes themselves, by tracemalloc.
- ``kept_mb``: memory of what is there in the end: the bytes, the parsed JSON and the trace; 0 if it is refused.
- ``held_mb``: resident memory of 96 of the legal shape that keeps the most, as a worker holds them that has as many in flight.
"""

import gc
import random
import resource
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
from kp_scorer.embedding.embedder import RECIPES
from kp_scorer.embedding.model import find_model
from kp_scorer.embedding.text_embedder import Tokens
from kp_scorer.errors import InvalidTrace
from kp_scorer.trace import ReasoningTrace

from tests.benchmarks.common import Row, arguments, emit, real, say, show_table
from tests.support.costly import costly_submissions, oversized_bodies
from tests.support.token_ids import ids_of

_IN_FLIGHT: Final = 96
_MB: Final = 1_000_000
_COLUMNS: Final = {"name": "submission", "kb": "kB", "ms": "ms", "peak_mb": "peak MB", "kept_mb": "kept MB", "ends": "ends as"}
_TEXT_COLUMNS: Final = {"name": "text", "kb": "kB", "first_ms": "first ms", "ms": "ms", "peak_mb": "peak MB"}

_WORD_CHARS: Final = (1, 2, 3, 5, 17, 18, 19, 33, 34, 50, 98, 99, 100, 101, 102, 500, 4_096, 10_000, 1_000_000)
_GAP_CHARS: Final = (0, 1, 1, 1, 2, 99, 500, 1_000, 4_096, 300_000)
_ALPHABETS: Final = {
    "a letter": "a",
    "letters": "abcdefghijklmnopqrstuvwxyz",
    "rare letters": "qxzj",
    "Cyrillic": "".join(map(chr, range(0x400, 0x460))),
    "syllables": "".join(map(chr, range(0xAC00, 0xD7A4))),
    "ideographs": "".join(map(chr, range(0x4E00, 0x9FFF))),
    "accented": "".join(map(chr, range(0x1E00, 0x1F00))),
    "marks": "".join(map(chr, range(0x300, 0x370))),
    "musical marks": "\U0001d165\U0001d166\U0001d16d\u302e",
    "controls": "".join(map(chr, range(32))),
    "white space": " \t\n\u00a0\u2003\u3000",
    "punctuation": "!()-./:;?[]_{}~",
    "beyond ASCII": "\u3002\u2014\u00bf\u00a7",
    "private use": "".join(map(chr, range(0xE000, 0xF900))),
    "planes 1 and 2": "".join(map(chr, range(0x10000, 0x30000))),
    "no ideographs": "".join(map(chr, (*range(0xA0, 0x3400), *range(0xA000, 0xD800), *range(0x10000, 0x20000)))),
    "added tokens": "[MASK]",
    "parts of added tokens": "[MASKCLSEPUND]#",
    "precomposed": "".join(map(chr, (*range(0xC0, 0x180), *range(0x1F00, 0x2000)))),
    "compatibility": "".join(map(chr, (*range(0xF900, 0xFB00), *range(0x2F800, 0x2FA20)))),
    "jamo": "".join(map(chr, range(0x1100, 0x1200))),
    "joined scripts": "".join(map(chr, (*range(0x600, 0x700), *range(0x900, 0xE80)))),
    "format characters": "\u00ad\u200b\u200d\u2060\ufeff\U000e0020",
    "emoji": "\U0001f468\u200d\U0001f469\ufe0f\U0001f3fd",
    "digits": "0123456789\u0660\u0966\U0001d7ce",
}


def main() -> None:
    options = arguments(__doc__, show=15, texts=300).parse_args()
    limits = Limits()
    # As in a worker that is ready.
    gc.collect()
    gc.freeze()
    rows = [measured(name, sent, limits) for name, sent in _messages(limits)]
    for row in rows:
        emit(row)
    for cost in ("ms", "peak_mb"):
        show_table(sorted(rows, key=lambda row: -float(row[cost]))[: options.show], _COLUMNS)
    if model := find_model(""):
        tokens = Tokens(model.tokenizer)
        text_rows = [costs_of_text(name, text, tokens) for name, text in texts(options.texts, limits)]
        for row in text_rows:
            emit(row)
        for cost in ("first_ms", "ms", "peak_mb"):
            show_table(sorted(text_rows, key=lambda row: -float(row[cost]))[: options.show], _TEXT_COLUMNS)
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


def texts(number: int, limits: Limits) -> Iterator[tuple[str, str]]:
    """Name and text of so many, the same each time: words of one alphabet, or of two, and what is between them of another."""
    chance = random.Random(1)
    for _ in range(number):
        of, mixed_in, between = chance.choices(list(_ALPHABETS), k=3)
        longest, gap = chance.choice(_WORD_CHARS), chance.choice(_GAP_CHARS)
        share = chance.choice([0.0, 0.0, 0.01, 0.5])
        alphabets = chance.choices((_ALPHABETS[of], _ALPHABETS[mixed_in]), (1 - share, share), k=longest)
        word = "".join(map(chance.choice, alphabets))
        period = word + "".join(chance.choices(_ALPHABETS[between], k=gap))
        repeated = period * (limits.message_bytes // len(period.encode()) + 1)
        text = repeated.encode()[: limits.message_bytes].decode(errors="ignore")
        yield f"{longest:,} of {of}, {share:.0%} of {mixed_in}; {gap:,} of {between}", text


def costs_of_text(name: str, text: str, tokens: Tokens) -> Row:
    """What it costs at most to make the tokens of a text, as one recipe or another does; the text does not count."""
    grown_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs = []
    for part in (part for recipe in RECIPES.values() for part in recipe.parts):
        seconds = []
        for _ in range(4):
            started = time.thread_time()
            ids_of(tokens, [text], part.max_tokens, keep_end=part.keeps_end)
            seconds.append(time.thread_time() - started)
        tracemalloc.start()
        ids_of(tokens, [text], part.max_tokens, keep_end=part.keeps_end)
        costs.append((seconds[0], min(seconds[1:]), tracemalloc.get_traced_memory()[1]))
        tracemalloc.stop()
    grown_bytes = 1_024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown_before)
    first_s, least_s, peak_bytes = map(max, zip(*costs, strict=True))
    return {
        "benchmark": "validation",
        "name": name,
        "kb": round(len(text.encode()) / 1_000),
        "first_ms": round(first_s * 1_000, 1),
        "ms": round(least_s * 1_000, 1),
        "peak_mb": round(max(peak_bytes, grown_bytes) / _MB, 1),
    }


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
