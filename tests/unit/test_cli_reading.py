"""Reading traces from files: lines, documents, and what is wrong with them."""

import errno
import gzip
import io
import json
import os
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.cli.input import open_input, read_traces
from kp_scorer.decoding import Limits
from kp_scorer.errors import InvalidTrace

from tests.support.builders import LIMITS, maximal_payload, minimal_payload

Found = list[tuple[int, str]]

ONE: Final = json.dumps(minimal_payload(trace_id="kp:trace:1")).encode()
TWO: Final = json.dumps(minimal_payload(trace_id="kp:trace:2")).encode()
INVALID: Final = "invalid"


def read(raw: bytes, limits: Limits = LIMITS) -> Found:
    """Number of each line, with its trace's id or that it is invalid."""
    lines = read_traces(io.BytesIO(raw), limits)
    return [(line.number, INVALID if isinstance(line.trace, InvalidTrace) else line.trace.id) for line in lines]


def problem(raw: bytes, limits: Limits = LIMITS) -> str:
    """What is wrong with the only invalid line."""
    (error,) = (line.trace for line in read_traces(io.BytesIO(raw), limits) if isinstance(line.trace, InvalidTrace))
    return str(error)


def pretty(payload: object) -> bytes:
    return json.dumps(payload, indent=2, ensure_ascii=False).encode()


@pytest.mark.parametrize("raw", [ONE + b"\n" + TWO, ONE + b"\n" + TWO + b"\n", ONE + b"\r\n" + TWO + b"\r\n"])
def test_each_line_is_a_trace(raw: bytes) -> None:
    assert read(raw) == [(1, "kp:trace:1"), (2, "kp:trace:2")]


def test_blank_lines_are_skipped_and_counted() -> None:
    assert read(b"\n \t\n" + ONE + b"\n\n\r\n" + TWO + b"\n\n") == [(3, "kp:trace:1"), (6, "kp:trace:2")]


@pytest.mark.parametrize("raw", [b"", b"\n", b" \n\r\n\t"])
def test_input_without_anything_has_no_traces(raw: bytes) -> None:
    assert read(raw) == []


@pytest.mark.parametrize("broken", [b"nope", b"{nope", b"}", b"\xff\xff", b'{"id": "\xff"}', b'"text"', b"5", b"null", b"{}"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_invalid_line_keeps_its_number_and_the_others_are_read(broken: bytes, before: int) -> None:
    lines = [ONE] * before + [broken, TWO]
    expected: Found = [(number, "kp:trace:1") for number in range(1, before + 1)]
    assert read(b"\n".join(lines)) == [*expected, (before + 1, INVALID), (before + 2, "kp:trace:2")]


def test_line_cut_off_within_a_text_is_invalid_alone() -> None:
    cut = ONE[: ONE.index(b"kp:trace") + 4]
    assert read(cut + b"\n" + TWO) == [(1, INVALID), (2, "kp:trace:2")]


@pytest.mark.parametrize("broken", [TWO[:-1], b"[]", b"[" + TWO + b"]", b"{"])
def test_only_the_first_line_can_open_a_document(broken: bytes) -> None:
    assert read(b"\n".join([ONE, broken, TWO])) == [(1, "kp:trace:1"), (2, INVALID), (3, "kp:trace:2")]


def test_last_line_may_be_cut_off() -> None:
    assert read(ONE + b"\n" + TWO[:-3]) == [(1, "kp:trace:1"), (2, INVALID)]


def test_line_nested_too_deep_is_invalid_alone() -> None:
    assert read(b'{"a":' * 100_000 + b"\n" + ONE) == [(1, INVALID), (2, "kp:trace:1")]


def test_invalid_line_says_what_is_wrong() -> None:
    assert problem(ONE + b"\n" + TWO.replace(b"kp:trace:2", b"2")).startswith("id: ")
    assert problem(ONE + b"\nnope") == "$: expected JSON; Expecting value at line 1 column 1"


@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\n \n"])
def test_one_pretty_printed_trace_is_one_trace(ending: bytes) -> None:
    assert read(pretty(maximal_payload()) + ending) == [(1, "kp:trace:maximal")]


def test_pretty_printed_trace_may_hold_any_script() -> None:
    payload = {"note": "é日本\U0001f600", **minimal_payload(trace_id="kp:trace:1", objective="größer")}
    raw = b'{"note": "\xc3\xa9\xe6\x97\xa5",\n' + pretty(payload)[1:]
    assert read(raw) == [(1, "kp:trace:1")]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_list_of_traces_is_numbered_by_item(indent: int | None) -> None:
    items: Sequence[object] = [json.loads(ONE), 5, {"id": "x"}, json.loads(TWO)]
    raw = json.dumps(items, indent=indent).encode()
    assert read(raw) == [(1, "kp:trace:1"), (2, INVALID), (3, INVALID), (4, "kp:trace:2")]


def test_empty_list_has_no_traces() -> None:
    assert read(b"[]\n") == []


@pytest.mark.parametrize("raw", [b"[" + ONE, b"[" + ONE + b",\n" + TWO + b"\n", pretty(minimal_payload())[:-2], b"[" * 100_000])
def test_broken_document_is_one_invalid_line(raw: bytes) -> None:
    assert read(raw) == [(1, INVALID)]


def test_limit_on_bytes_holds_for_each_trace_and_not_for_a_list_of_them() -> None:
    payload = minimal_payload(trace_id="kp:trace:1")
    compact = json.dumps(payload, separators=(",", ":"))
    limits = Limits(message_bytes=len(compact))
    assert read(json.dumps([payload] * 3, indent=2).encode(), limits) == [(number, "kp:trace:1") for number in (1, 2, 3)]
    assert read(json.dumps([payload, payload | {"x": 1}]).encode(), limits) == [(1, "kp:trace:1"), (2, INVALID)]
    assert read(compact.encode() + b"\n" + compact[:-1].encode() + b',"x":1}', limits) == [(1, "kp:trace:1"), (2, INVALID)]


def test_traces_are_read_as_they_come_in() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb", buffering=0) as source:  # noqa: PTH123 - of descriptors
        source.write(ONE + b"\n")
        lines = read_traces(stream, LIMITS)
        assert next(lines).number == 1
        source.write(TWO + b"\n")
        assert next(lines).number == 2


class Endless(io.RawIOBase):
    """Gives the same bytes for ever, or fails."""

    def __init__(self, chunk: bytes) -> None:
        self._chunk = chunk

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._chunk:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        buffer[: len(self._chunk)] = self._chunk
        return len(self._chunk)


@pytest.mark.parametrize(
    ("chunk", "said"),
    [
        (b"\0" * 8_192, "line 1: expected its end within 268435456 bytes"),
        (b"[" + b" " * 8_191, "line 1 begins a document: expected one of at most 268435456 bytes; JSON Lines may be longer"),
        (b"", "it cannot be read: Input/output error"),
    ],
)
def test_input_without_end_is_refused_and_so_is_what_cannot_be_read(chunk: bytes, said: str) -> None:
    with pytest.raises(click.BadParameter, match=said):
        list(read_traces(io.BufferedReader(Endless(chunk), 8_192), LIMITS))


def test_a_line_much_too_long_is_one_error_with_its_size_and_is_never_held_whole() -> None:
    long = b'{"id":"' + b"x" * 50_000_000
    stream = io.BytesIO(b"\xef\xbb\xbf" + b"\n".join([long, ONE, long, TWO, long]))
    tracemalloc.start()
    lines = list(read_traces(stream, LIMITS))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(line.number, isinstance(line.trace, InvalidTrace)) for line in lines] == [
        (number, number % 2 == 1) for number in range(1, 6)
    ]
    assert str(lines[0].trace).endswith(f"expected at most {LIMITS.message_bytes} bytes, got {len(long) + 1}")
    assert peak < 20_000_000


@given(st.lists(st.sampled_from([ONE, b"", b"nope", b"{}"])))
def test_every_line_that_is_not_blank_is_read_once(lines: list[bytes]) -> None:
    expected = [number for number, line in enumerate(lines, start=1) if line]
    assert [number for number, _ in read(b"\n".join(lines))] == expected


@pytest.mark.parametrize("rest", [ONE + b"\n" + TWO, b"[" + ONE + b",\n" + TWO + b"]", pretty(json.loads(ONE)), b""])
def test_a_byte_order_mark_is_no_part_of_the_first_line(rest: bytes) -> None:
    assert read(b"\xef\xbb\xbf" + rest) == read(rest)


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (gzip.compress(gzip.compress(ONE, mtime=0), mtime=0), "gzip"),
        (ONE.decode().encode("utf-16"), "UTF-16"),
        (b"id,objective,steps\n1,pay,3\n", "CSV"),
        (b'\xef\xbb\xbf"id";"the objective";\r\n1;2;\r\n', "CSV"),
        (b"id\tobjective\n", "CSV"),
    ],
)
def test_another_format_is_one_error_that_names_what_was_expected(raw: bytes, named: str) -> None:
    with pytest.raises(click.BadParameter, match=rf"expected JSON Lines or one JSON document, in UTF-8; .* {named}$"):
        read(raw)


def test_file_is_opened_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_bytes(ONE)
    with open_input(str(tmp_path / "traces.jsonl")) as stream:
        assert [line.number for line in read_traces(stream, LIMITS)] == [1]


def test_file_that_cannot_be_opened_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(click.BadParameter, match=r"absent\.jsonl: No such file"), open_input(str(tmp_path / "absent.jsonl")):
        pass
    with pytest.raises(click.BadParameter, match="Is a directory"), open_input(str(tmp_path)):
        pass
