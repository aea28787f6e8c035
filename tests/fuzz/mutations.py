"""Turns good submissions into the kinds that careless, foreign and hostile producers send.

Mutations change values; damage changes bytes, as broken producers, proxies and disks do.

Every text and every odd number that gets into a submission carries a mark, so that a test can tell whether an error message
quotes what it must not.
"""

import codecs
import json
import math
import os
import random
from collections.abc import Callable
from typing import Any, Final

from tests.support.builders import maximal_payload
from tests.support.traces import sample_traces

SEED: Final = int(os.environ.get("FUZZ_SEED", "20261121"))
TEXT_MARK: Final = "Xylophonia"
NUMBER_MARK: Final = "86753090"

Holder = Any
"""An object or a list inside a payload."""

_LONGEST_FIELD: Final = 100_000
_PROTOTYPE_NAMES: Final = ("__proto__", "constructor", "prototype", "toString", "hasOwnProperty", "__class__", "__init__")
_DATES: Final = (
    *("2026-01-01", "2026-01-01T00:00", "2026-13-45T00:00:00Z", "2026-01-01T25:61:61Z", "20260101T000000Z"),
    *("2026-W01-1T00:00:00", "2026-01-01T00:00:00,123456789+99:99", "+002026-01-01T00:00:00Z", "0000-00-00T00:00:00Z"),
    *("01/02/2026 03:04:05", "1767225600", "2026-01-01T00:00:00\u0660Z", "\uff12\uff10\uff12\uff16-01-01T00:00:00Z"),
)
_TEXTS: Final = (
    *("", " ", "\0", "\ud800", "\udfff\ud800", "\u202e\u2066", "\ufeff", "\U0001f9ea" * 50, "e\u0301" * 100),
    *("%s%n{0}${jndi}", "'; DROP TABLE traces; --", "true", "NaN", "kp:trace:", "kp:trace:\n", *_PROTOTYPE_NAMES),
)
_NUMBERS: Final = (
    *(0, 1, -1, 0.5, -0.0, 1.0000000000000002, 5e-324, 1e308, -1e308, math.nan, math.inf, -math.inf),
    *(2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64),
    *(int(NUMBER_MARK), -int(NUMBER_MARK), float(NUMBER_MARK) + 0.5, int(NUMBER_MARK * 50), int(NUMBER_MARK * 530)),
)
HUGE_NUMBER: Final = NUMBER_MARK * 625
"""A number of 5,000 digits, as text, because Python refuses to convert so many digits."""

_ENCODINGS: Final = ("utf-16", "utf-16-be", "utf-32", "utf-7", "utf-8-sig", "cp1252", "cp037", "shift_jis")
_NOT_UTF8: Final = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80")
_NOT_JSON: Final = (
    *(b"NaN", b"-Infinity", b"1e99999", b"-", b"01", b"0x10", b"undefined", b"'a'", b"\\u12", b"//", b",", b"}", b"]"),
)
_BYTE_ORDER_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE)
_DEPTHS: Final = (10, 40, 300, 990, 5_000, 100_000)


def base_texts() -> list[str]:
    """Return good submissions as JSON, with a mark in each text that may be anything."""
    payloads = [*sample_traces(), maximal_payload()]
    for payload in payloads:
        payload["task"]["objective"] += f" {TEXT_MARK}"
        payload["outcome"]["result_summary"] += f" {TEXT_MARK}"
        for step in payload["steps"]:
            step["content"] = f"{TEXT_MARK} {step.get('content', '')}"
    return [json.dumps(payload, ensure_ascii=False) for payload in payloads]


def mutated_payload(chance: random.Random, base: str) -> Any:
    """Return a submission, parsed, with one to four changes."""
    root = [json.loads(base)]
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 4))):
        chance.choices(_MUTATIONS, _WEIGHTS)[0](chance, *_place(chance, root))
        if not root:
            return None
    return root[0]


def odd_value(chance: random.Random) -> Any:
    """Return a value that hardly any field expects."""
    match chance.randrange(8):
        case 0:
            return chance.choice((None, True, False, [], {}, [[]], {"": {}}, [None] * 100))
        case 1 | 2:
            return chance.choice(_NUMBERS)
        case 3:
            return chance.choice(_DATES)
        case 4:
            return f"{TEXT_MARK} {chance.choice(_TEXTS)}"
        case 5:
            return {chance.choice(_PROTOTYPE_NAMES): {TEXT_MARK: chance.choice(_NUMBERS)}}
        case 6:
            return chance.choice(_TEXTS)
        case _:
            return _large_value(chance)


def _large_value(chance: random.Random) -> Any:
    match chance.randrange(50):
        case 0:
            over = chance.choice((-1, 0, 1))
            return TEXT_MARK.ljust(_LONGEST_FIELD + over, "x")
        case 1:
            return {f"{TEXT_MARK}{number}": number for number in range(500)}
        case 2:
            return [{"step_id": number, "type": "thought"} for number in range(chance.choice((1_999, 2_000, 2_001)))]
        case _:
            return nested(chance.choice((2, 8, 28, 30, 31, 32, 33, 64, 200, 500)), chance)


def nested(depth: int, chance: random.Random) -> Any:
    """Return lists and objects that are nested ``depth`` deep."""
    value: Any = TEXT_MARK
    for _ in range(depth):
        value = [value] if chance.random() < 0.5 else {TEXT_MARK: value}
    return value


def _place(chance: random.Random, root: Holder) -> tuple[Holder, Any]:
    """Pick a value somewhere in a payload; return the object or list that holds it, and its key or position there."""
    holder, key = root, 0
    while (inside := holder[key]) and isinstance(inside, dict | list) and chance.random() < (0.98 if holder is root else 0.75):
        holder, key = inside, chance.choice(list(inside) if isinstance(inside, dict) else range(len(inside)))
    return holder, key


def _swap_type(chance: random.Random, holder: Holder, key: Any) -> None:
    """Convert a value to another type: a number to text, a text to a list, an object to a list of pairs."""
    value = holder[key]
    match value:
        case bool() | int() | float():
            holder[key] = chance.choice((str(value), [value], bool(value), -value))
        case str():
            holder[key] = chance.choice(([value], {TEXT_MARK: value}, len(value), value.encode("utf-8", "replace").hex()))
        case dict():
            holder[key] = chance.choice(([[name, item] for name, item in value.items()], list(value.values()), str(len(value))))
        case list():
            holder[key] = chance.choice(({str(index): item for index, item in enumerate(value)}, len(value), value * 3))
        case None:
            holder[key] = "null"


def _rename(chance: random.Random, holder: Holder, key: Any) -> None:
    if isinstance(holder, dict):
        name = chance.choice((f"{key}{TEXT_MARK}", key.upper(), f" {key}", *_PROTOTYPE_NAMES, "\ud800", "\0", ""))
        holder[name] = holder.pop(key)


def _add(chance: random.Random, holder: Holder, key: Any) -> None:
    if isinstance(holder, dict):
        holder[chance.choice((TEXT_MARK, *_PROTOTYPE_NAMES, "\udc80", ""))] = odd_value(chance)
    else:
        holder.insert(key, odd_value(chance))


def _repeat(chance: random.Random, holder: Holder, key: Any) -> None:
    """Repeat an item of a list, or add an object's value under a second name."""
    if isinstance(holder, dict):
        holder[f"{key}{TEXT_MARK}"] = holder[key]
    else:
        holder[key:key] = [holder[key]] * chance.choice((1, 2, 30))


def _move(chance: random.Random, holder: Holder, key: Any) -> None:
    """Swap a value with another."""
    target = chance.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[target] = holder[target], holder[key]


_MUTATIONS: Final[tuple[Callable[[random.Random, Holder, Any], object], ...]] = (
    lambda chance, holder, key: holder.pop(key),
    lambda chance, holder, key: holder.__setitem__(key, odd_value(chance)),
    *(_swap_type, _rename, _add, _repeat, _move),
)
_WEIGHTS: Final = (2, 4, 2, 2, 3, 2, 1)


def damaged(chance: random.Random, raw: bytes) -> bytes:
    """Return the bytes of a submission after one or two kinds of damage."""
    for _ in range(chance.choice((1, 1, 2))):
        raw = chance.choice(_DAMAGES)(chance, raw)
    return raw


def _flip_bits(chance: random.Random, raw: bytes) -> bytes:
    flipped = bytearray(raw)
    for _ in range(chance.choice((1, 2, 8)) if raw else 0):
        flipped[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _lose_a_piece(chance: random.Random, raw: bytes) -> bytes:
    start = chance.randrange(len(raw) + 1)
    return raw[:start] + raw[start + chance.randrange(1, 200) :]


def _repeat_a_piece(chance: random.Random, raw: bytes) -> bytes:
    start = chance.randrange(len(raw) + 1)
    end = start + chance.randrange(1, 200)
    return raw[:end] + raw[start:]


def _insert(chance: random.Random, raw: bytes) -> bytes:
    piece = chance.choice((b"\0", b"\r\n", chance.randbytes(8), *_NOT_UTF8, *_NOT_JSON))
    at = chance.randrange(len(raw) + 1)
    return raw[:at] + piece + raw[at:]


def _repeat_a_key(chance: random.Random, raw: bytes) -> bytes:
    name = chance.choice((b"id", b"task", b"steps", b"outcome", b"metadata", b"@type"))
    extra = b'"%s": "%s"' % (name, TEXT_MARK.encode())
    if chance.random() < 0.5:
        return raw.replace(b"{", b"{%s, " % extra, 1)
    return raw[::-1].replace(b"}", (b", %s}" % extra)[::-1], 1)[::-1]


def _write_a_huge_value(chance: random.Random, raw: bytes) -> bytes:
    """Insert a number of 5,000 digits, or nesting too deep for recursive parsers, before a value."""
    colon = raw.find(b":", chance.randrange(len(raw) + 1))
    depth = chance.choice(_DEPTHS)
    value = HUGE_NUMBER.encode() if chance.random() < 0.5 else b"[" * depth + b"]" * depth
    return raw[: colon + 1] + value + b"," + raw[colon + 1 :]


def _wrap(chance: random.Random, raw: bytes) -> bytes:
    before, after = chance.choice(((b"[", b"]"), (b"", b"\n"), (b"{", b"}"), (b'{"trace": ', b"}"), (b"", raw[:100])))
    return before + raw + after


_DAMAGES: Final[tuple[Callable[[random.Random, bytes], bytes], ...]] = (
    lambda chance, raw: raw[: chance.randrange(len(raw) + 1)],
    *(_flip_bits, _lose_a_piece, _repeat_a_piece, _insert),
    lambda chance, raw: raw.decode("utf-8", "replace").encode(chance.choice(_ENCODINGS), "replace"),
    lambda chance, raw: chance.choice(_BYTE_ORDER_MARKS) + raw,
    *(_repeat_a_key, _write_a_huge_value, _wrap),
)
