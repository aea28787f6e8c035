"""Reading gzip files: whole, in pieces, as they come in, and what is wrong with them."""

import gzip
import io
import json
import os
import tracemalloc
import zlib
from typing import Any, Final

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.cli.gunzip import Gunzip, is_gzip
from kp_scorer.cli.input import read_traces

from tests.support.builders import LIMITS, minimal_payload

ONE: Final = json.dumps(minimal_payload(trace_id="kp:trace:1")).encode()
TWO: Final = json.dumps(minimal_payload(trace_id="kp:trace:2")).encode()
BOTH: Final = [(1, "kp:trace:1"), (2, "kp:trace:2")]


class Pieces(io.RawIOBase):
    """Gives bytes in pieces of a size."""

    def __init__(self, content: bytes, size: int) -> None:
        self._content = io.BytesIO(content)
        self._size = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        some = self._content.read(min(self._size, len(buffer)))
        buffer[: len(some)] = some
        return len(some)


def unpacked(content: bytes, size: int = 65_536) -> bytes:
    return io.BufferedReader(Gunzip(io.BufferedReader(Pieces(content, size)))).read()


def read(raw: bytes) -> list[tuple[int, str]]:
    return [(line.number, getattr(line.trace, "id", "invalid")) for line in read_traces(io.BytesIO(raw), LIMITS)]


@given(st.lists(st.binary(max_size=500)), st.integers(1, 100), st.binary(max_size=3).map(lambda zeros: bytes(len(zeros))))
def test_members_in_pieces_of_any_size_are_unpacked_together(members: list[bytes], size: int, padding: bytes) -> None:
    packed = padding.join(map(gzip.compress, members)) + padding if members else b""
    if members:
        assert unpacked(packed, size) == b"".join(members)


@pytest.mark.parametrize("document", [ONE + b"\n" + TWO, b"[" + ONE + b",\n" + TWO + b"]", b"\n\n" + ONE + b"\n" + TWO + b"\n"])
def test_lines_and_documents_may_be_gzipped(document: bytes) -> None:
    assert read(gzip.compress(document)) == read(document)


def test_files_that_were_gzipped_apart_may_be_put_together() -> None:
    assert read(gzip.compress(ONE + b"\n") + gzip.compress(TWO)) == BOTH


def test_gzipped_traces_are_read_as_they_come_in() -> None:
    reading, writing = os.pipe()
    deflate = zlib.compressobj(wbits=31)
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as source:  # noqa: PTH123 - of descriptors
        source.write(deflate.compress(ONE + b"\n") + deflate.flush(zlib.Z_SYNC_FLUSH))
        lines = read_traces(stream, LIMITS)
        assert next(lines).number == 1
        source.write(deflate.compress(TWO + b"\n") + deflate.flush(zlib.Z_SYNC_FLUSH))
        assert next(lines).number == 2


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (gzip.compress(ONE, mtime=0)[:-9], "cut off"),
        (gzip.compress(ONE, mtime=0)[:5], "cut off"),
        (b"\x1f", "cut off"),
        (gzip.compress(ONE, mtime=0)[:-1] + b"\xff", "damaged"),
        (b"\x1f\x8bnope, not at all", "damaged"),
        (gzip.compress(ONE, mtime=0) + b"something else", "damaged"),
    ],
)
def test_what_is_wrong_with_a_gzip_file_is_said(raw: bytes, said: str) -> None:
    with pytest.raises(click.BadParameter, match=f"^it cannot be read: a gzip file that is {said}$"):
        list(read_traces(io.BytesIO(raw), LIMITS))


def test_what_comes_before_the_damage_is_read() -> None:
    lines = read_traces(io.BytesIO(gzip.compress(ONE + b"\n") + gzip.compress(TWO)[:-40]), LIMITS)
    assert next(lines).number == 1


@pytest.mark.parametrize("raw", [b"", b"\n", b"[]", ONE, b"\x8b\x1f"])
def test_what_begins_otherwise_is_no_gzip_file(raw: bytes) -> None:
    assert not is_gzip(raw)


@pytest.mark.parametrize("opening", [b"", b"["])
def test_a_file_that_unpacks_to_much_too_much_is_refused_and_never_held(opening: bytes) -> None:
    # A quarter of a gigabyte and more in 300 kB.
    deflate = zlib.compressobj(1, wbits=31)
    piece = b" " * 1_000_000 if opening else b"\0" * 1_000_000
    bomb = deflate.compress(opening) + b"".join(deflate.compress(piece) for _ in range(300)) + deflate.flush()
    tracemalloc.start()
    with pytest.raises(click.BadParameter, match="expected"):
        list(read_traces(io.BytesIO(bomb), LIMITS))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # A document is held whole, and put together once more.
    assert peak < (900_000_000 if opening else 20_000_000)
