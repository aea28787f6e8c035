"""Damage to a submission's bytes: what broken producers, proxies and disks do to JSON."""

import codecs
import random
from collections.abc import Callable
from typing import Final

from tests.support.mutations import HUGE_NUMBER, TEXT_MARK

_ENCODINGS: Final = ("utf-16", "utf-16-be", "utf-32", "utf-7", "utf-8-sig", "cp1252", "cp037", "shift_jis")
_NOT_UTF8: Final = (b"\xff", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x82", b"\x80")
_NOT_JSON: Final = (
    b"NaN",
    b"-Infinity",
    b"1e99999",
    b"-",
    b"01",
    b"0x10",
    b"undefined",
    b"'a'",
    b"\\u12",
    b"//",
    b",",
    b"}",
    b"]",
)
_BYTE_ORDER_MARKS: Final = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE)
_DEPTHS: Final = (10, 40, 300, 990, 5_000, 100_000)


def damaged(chance: random.Random, raw: bytes) -> bytes:
    """The bytes of a submission with one or two things done to them."""
    for _ in range(chance.choice((1, 1, 2))):
        raw = chance.choice(_DAMAGES)(chance, raw)
    return raw


def _cut(chance: random.Random, raw: bytes) -> bytes:
    return raw[: chance.randrange(len(raw) + 1)]


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


def _encode_otherwise(chance: random.Random, raw: bytes) -> bytes:
    return raw.decode("utf-8", "replace").encode(chance.choice(_ENCODINGS), "replace")


def _mark_the_byte_order(chance: random.Random, raw: bytes) -> bytes:
    return chance.choice(_BYTE_ORDER_MARKS) + raw


def _say_a_key_twice(chance: random.Random, raw: bytes) -> bytes:
    name = chance.choice((b"id", b"task", b"steps", b"outcome", b"metadata", b"@type"))
    extra = b'"%s": "%s"' % (name, TEXT_MARK.encode())
    if chance.random() < 0.5:
        return raw.replace(b"{", b"{%s, " % extra, 1)
    return raw[::-1].replace(b"}", (b", %s}" % extra)[::-1], 1)[::-1]


def _write_a_huge_value(chance: random.Random, raw: bytes) -> bytes:
    """A number of 5,000 digits, or nesting that no parser recurses into, where a value was."""
    colon = raw.find(b":", chance.randrange(len(raw) + 1))
    depth = chance.choice(_DEPTHS)
    value = HUGE_NUMBER.encode() if chance.random() < 0.5 else b"[" * depth + b"]" * depth
    return raw[: colon + 1] + value + b"," + raw[colon + 1 :]


def _wrap(chance: random.Random, raw: bytes) -> bytes:
    before, after = chance.choice(((b"[", b"]"), (b"", b"\n"), (b"{", b"}"), (b'{"trace": ', b"}"), (b"", raw[:100])))
    return before + raw + after


_Damage = Callable[[random.Random, bytes], bytes]
_DAMAGES: Final[tuple[_Damage, ...]] = (
    _cut,
    _flip_bits,
    _lose_a_piece,
    _repeat_a_piece,
    _insert,
    _encode_otherwise,
    _mark_the_byte_order,
    _say_a_key_twice,
    _write_a_huge_value,
    _wrap,
)
