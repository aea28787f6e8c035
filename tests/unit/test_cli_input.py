"""Commands read lines, documents and compressed files, refuse invalid and endless input, and read ahead."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.adapters.node import objects_in
from kp_scorer.cli.input import ReadAhead, read_files, read_traces
from kp_scorer.cli.unpacking import unpacked
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits

from tests.support.builders import LIMITS, maximal_payload, minimal_payload
from tests.support.calls import traced_memory
from tests.support.commands import json_lines
from tests.support.converting import values_read
from tests.support.processes import wait_until
from tests.unit.test_adapters import EXAMPLES

Lines = list[tuple[int, str]]

FIRST: Final = json.dumps(minimal_payload(trace_id="kp:trace:1")).encode()
SECOND: Final = json.dumps(minimal_payload(trace_id="kp:trace:2")).encode()
INVALID: Final = "invalid"


def read(raw: bytes, limits: Limits = LIMITS) -> Lines:
    """Return the number of each line with the id of its trace, or with ``INVALID``."""
    lines = read_traces(io.BufferedReader(io.BytesIO(raw)), limits)
    return [(line.number, INVALID if isinstance(line.trace, InvalidTrace) else line.trace.id) for line in lines]


def pretty(payload: object) -> bytes:
    return json.dumps(payload, indent=2, ensure_ascii=False).encode()


def test_blank_lines_are_skipped_and_counted_and_without_others_there_are_no_traces() -> None:
    assert read(b"\n \t\n" + FIRST + b"\n\n\r\n" + SECOND + b"\n\n") == [(3, "kp:trace:1"), (6, "kp:trace:2")]
    assert [read(raw) for raw in (b"", b"\n", b" \n\r\n\t", b"[]\n")] == [[]] * 4


@pytest.mark.parametrize(
    "broken",
    [
        *(b"nope", b"{nope", b"}", b"\xff\xff", b'{"id": "\xff"}', b'"text"', b"5", b"null", b"{}"),
        FIRST[: FIRST.index(b"kp:trace") + 4],
        b'{"a":' * 100_000,
    ],
    ids=lambda broken: ascii(broken[:9]),
)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_invalid_line_keeps_its_number_and_the_others_are_read(broken: bytes, before: int) -> None:
    lines = [FIRST] * before + [broken, SECOND]
    expected: Lines = [(number, "kp:trace:1") for number in range(1, before + 1)]
    assert read(b"\n".join(lines)) == [*expected, (before + 1, INVALID), (before + 2, "kp:trace:2")]


@pytest.mark.parametrize("broken", [SECOND[:-1], b"[]", b"[" + SECOND + b"]", b"{"])
def test_only_the_first_line_can_open_a_document(broken: bytes) -> None:
    assert read(b"\n".join([FIRST, broken, SECOND])) == [(1, "kp:trace:1"), (2, INVALID), (3, "kp:trace:2")]


LONG: Final = "x" * (2 * LIMITS.message_bytes)


@pytest.mark.parametrize(
    ("raw", "values"),
    [
        (b'[{"a":1},\n{"b":2}]\n', [(1, [{"a": 1}, {"b": 2}])]),
        (b'[\n{"a":1},\n{"b":2}\n]', [(1, [{"a": 1}, {"b": 2}])]),
        (b'{"spans":[\n{"a":1}\n]}', [(1, {"spans": [{"a": 1}]})]),
        (b'{"a":1}\n{"b":2}\n', [(1, {"a": 1}), (2, {"b": 2})]),
        (b"[1]\n\n[2, 3]\n[\n", [(1, [1]), (3, [2, 3]), (4, INVALID)]),
        (b"[1,\n2]\n", [(1, [1, 2])]),
        (b'{"a":\n1}', [(1, {"a": 1})]),
        (b'{"a":\n{"b": 1}\n{"c": 2}\n', [(1, INVALID), (2, {"b": 1}), (3, {"c": 2})]),
        (b"[1,\n2", [(1, INVALID)]),
        (json_lines({"a": 1}, {"messages": LONG}), [(1, {"a": 1}), (2, {"messages": LONG})]),
    ],
    ids=lambda part: ascii(part)[:30],
)
def test_lines_and_documents_of_any_json_may_be_converted(raw: bytes, values: list[tuple[int, object]]) -> None:
    read = values_read(io.BufferedReader(io.BytesIO(raw)))
    assert [(number, INVALID if isinstance(value, InvalidTrace) else value) for number, value in read] == values


@pytest.mark.parametrize("first", [b"{", b'{"note": "\xc3\xa9\xe6\x97\xa5",\n'], ids=["a brace", "any script"])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\n\n \n"])
def test_pretty_printed_trace_of_any_script_is_one_document(first: bytes, ending: bytes) -> None:
    payload = maximal_payload() | {"other": "größer é日本\U0001f600"}
    assert read(first + pretty(payload)[1:] + ending) == [(1, "kp:trace:maximal")]


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_list_of_traces_is_numbered_by_item(indent: int | None) -> None:
    items: Sequence[object] = [json.loads(FIRST), 5, {"id": "x"}, json.loads(SECOND)]
    raw = json.dumps(items, indent=indent).encode()
    assert read(raw) == [(1, "kp:trace:1"), (2, INVALID), (3, INVALID), (4, "kp:trace:2")]


@pytest.mark.parametrize(
    "raw",
    [
        *(b"[" + FIRST, b"[" + FIRST + b",\n" + SECOND + b"\n", FIRST + b", " + SECOND, FIRST + SECOND[:-1], FIRST + b" 5"),
        *(pretty(minimal_payload())[:-2], pretty(minimal_payload()) + b"5", b"[" * 100_000, b'["'),
    ],
)
def test_broken_document_is_an_invalid_trace(raw: bytes) -> None:
    assert read(raw) == [(1, INVALID)]


@pytest.mark.parametrize("between", [b"", b" ", b"\r", b" \n", b"\xef\xbb\xbf"], ids=ascii)
def test_documents_need_no_line_breaks_between_them(between: bytes) -> None:
    compact, indented = (between.join(documents) for documents in ([FIRST, b"{}", SECOND], [pretty(json.loads(FIRST)), SECOND]))
    assert [each for _, each in read(compact)] == ["kp:trace:1", INVALID, "kp:trace:2"]
    assert [each for _, each in read(b"\n" + indented)] == ["kp:trace:1", "kp:trace:2"]
    assert read(b"[" + FIRST + b"]" + between.strip() + SECOND) == [(1, "kp:trace:1"), (1, "kp:trace:2")]


def test_limit_on_bytes_applies_to_each_trace_of_a_list() -> None:
    payload = minimal_payload(trace_id="kp:trace:1")
    compact = json.dumps(payload, separators=(",", ":"))
    limits = Limits(message_bytes=len(compact))
    assert read(json.dumps([payload] * 3, indent=2).encode(), limits) == [(number, "kp:trace:1") for number in (1, 2, 3)]
    assert read(json.dumps([payload, payload | {"x": 1}]).encode(), limits) == [(1, "kp:trace:1"), (2, INVALID)]
    assert read(compact.encode() + b"\n" + compact[:-1].encode() + b',"x":1}', limits) == [(1, "kp:trace:1"), (2, INVALID)]


class Source(io.RawIOBase):
    """A stream whose bytes come from a function, which gets the largest number of bytes that it may return."""

    def __init__(self, take: Callable[[int], bytes]) -> None:
        self._take = take

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._take(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def broken_disk(_: int) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize(
    ("take", "message"),
    [
        (b"x".__mul__, "line 1: expected its end within 268435456 bytes"),
        (bytes, "expected JSON Lines or one JSON document, in UTF-8"),
        (broken_disk, "it cannot be read: Input/output error"),
    ],
)
def test_endless_or_unreadable_input_is_refused(take: Callable[[int], bytes], message: str) -> None:
    with pytest.raises(click.BadParameter, match=message):
        list(read_traces(io.BufferedReader(Source(take), 8_192), LIMITS))


def test_line_far_over_the_limit_is_one_error_and_not_held_in_memory() -> None:
    long = b'{"id":"' + b"x" * 25_000_000
    stream: io.BufferedReader = io.BufferedReader(io.BytesIO(b"\xef\xbb\xbf" + b"\n".join([long, FIRST, long, SECOND, long])))
    with traced_memory() as memory:
        lines = list(read_traces(stream, LIMITS))
    invalid = [(each.number, isinstance(each.trace, InvalidTrace)) for each in lines]
    assert invalid == [(number, number % 2 == 1) for number in range(1, 6)]
    assert str(lines[0].trace).endswith(f"expected at most {LIMITS.message_bytes} bytes, got {len(long) + 1}")
    assert memory.peak_bytes < 20_000_000


@pytest.mark.parametrize("text", ["]}" * 10_000_000, '\\"{' * 10_000_000], ids=["brackets", "quotes"])
def test_document_far_over_the_limit_costs_none_of_those_after_it(text: str) -> None:
    long = pretty(json.loads(FIRST) | {"x": text})
    raw = b"\n".join([pretty(json.loads(FIRST)), long, pretty(json.loads(SECOND))])
    stream: io.BufferedReader = io.BufferedReader(io.BytesIO(raw))
    with traced_memory() as memory:
        lines = list(read_traces(stream, LIMITS))
    assert [getattr(line.trace, "id", INVALID) for line in lines] == ["kp:trace:1", INVALID, "kp:trace:2"]
    assert memory.peak_bytes < 40_000_000


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_line_of_each_format_may_be_larger_than_a_trace(name: str) -> None:
    example = EXAMPLES[name]
    for item in objects_in(example if isinstance(example, list) else [example]):
        grown = item | {"text": "a" * 2 * LIMITS.message_bytes}
        assert values_read(io.BufferedReader(io.BytesIO(json.dumps(grown).encode()))) == [(1, grown)]


DOCUMENTS: Final = (
    *(FIRST + b"\n" + SECOND, b"[" + FIRST + b",\n" + SECOND + b"]", pretty(json.loads(FIRST)), b""),
    b"\n\n" + FIRST + b"\n" + SECOND + b"\n",
)


def zstandard() -> Any:
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_byte_order_mark_is_skipped_and_compressed_files_are_unpacked(document: bytes) -> None:
    assert read(b"\xef\xbb\xbf" + document) == read(gzip.compress(document)) == read(document)
    assert read(zstandard().compress(document)) == read(document)


def test_zstandard_frames_are_read_as_one_and_refused_if_cut_off_or_too_large() -> None:
    zstd = zstandard()
    frames = zstd.compress(FIRST + b"\n") + zstd.compress(SECOND)
    # pzstd writes the size of each frame before the frame, in a frame of its own that readers skip.
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00size"
    assert read(frames) == read(skipped + frames) == [(1, "kp:trace:1"), (2, "kp:trace:2")]
    unsized = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    wide = unsized.compress(FIRST) + unsized.flush()
    damaged = frames[:-5] + bytes(5)
    for raw, problem in ((frames[:-3], "cut off"), (damaged, "damaged"), (frames + b"something", "damaged"), (wide, "damaged")):
        with pytest.raises(click.BadParameter, match=f"a compressed file that is {problem}$"):
            read(raw)


def test_the_error_names_the_package_that_unpacks_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_scorer.cli.unpacking._zstd", None)
    with pytest.raises(click.BadParameter, match=r"pip install backports\.zstd"):
        read(b"\x28\xb5\x2f\xfd")


@pytest.mark.parametrize(
    "raw",
    [
        *(gzip.compress(gzip.compress(FIRST, mtime=0), mtime=0), lzma.compress(FIRST), bz2.compress(FIRST)),
        FIRST.decode().encode("utf-16"),
        *(b"id,objective,steps\n1,pay,3\n", b'\xef\xbb\xbf"id";"the objective";\r\n1;2;\r\n', b"id\tobjective\n"),
    ],
)
def test_another_format_is_one_error(raw: bytes) -> None:
    with pytest.raises(click.BadParameter, match="expected JSON Lines or one JSON document, in UTF-8"):
        read(raw)


@pytest.mark.parametrize("raw", [b"\xff\xfe{\x00", gzip.compress(SECOND)[:-9], None], ids=["UTF-16", "cut gzip", "gone"])
def test_one_file_that_cannot_be_read_leaves_the_others(tmp_path: Path, raw: bytes | None) -> None:
    for name, content in [("a.json", FIRST), ("b.json", raw or FIRST), ("c.json", SECOND)]:
        (tmp_path / name).write_bytes(content)
    lines = read_files([str(tmp_path)], LIMITS)
    first = next(lines)
    if raw is None:
        # Simulate a log rotation that happens after the folder has been listed.
        (tmp_path / "b.json").unlink()
    invalid = [(Path(each.file).name, isinstance(each.trace, InvalidTrace)) for each in (first, *lines)]
    assert invalid == [("a.json", False), ("b.json", True), ("c.json", False)]


@given(st.lists(st.binary(max_size=500), min_size=1), st.integers(1, 100), st.integers(0, 3))
def test_members_are_decompressed_one_after_the_other(members: list[bytes], size: int, zeros: int) -> None:
    packed = io.BytesIO(bytes(zeros).join(map(gzip.compress, members)) + bytes(zeros))
    pieces: io.BufferedReader = io.BufferedReader(Source(lambda most: packed.read(min(size, most))))
    assert unpacked(pieces).read() == b"".join(members)


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (gzip.compress(FIRST, mtime=0)[:-9], "cut off"),
        (b"\x1f", "damaged"),
        (gzip.compress(FIRST, mtime=0)[:-1] + b"\xff", "damaged"),
        (gzip.compress(FIRST, mtime=0)[:10] + bytes(50), "damaged"),
        (gzip.compress(FIRST, mtime=0) + b"something else", "damaged"),
    ],
)
def test_damaged_gzip_file_is_refused(raw: bytes, problem: str) -> None:
    with pytest.raises(click.BadParameter, match=f"^it cannot be read: a compressed file that is {problem}$"):
        list(read_traces(io.BufferedReader(io.BytesIO(raw)), LIMITS))


# Lines and objects are held one at a time. A list, or JSON of other tools, may be one document, which is held as a whole.
@pytest.mark.parametrize(
    ("read_all", "opening", "piece", "megabytes", "peak_bytes"),
    [
        (read_traces, b"", b"x", 60, 40_000_000),
        (read_traces, b"[", b"{},", 12, 44_000_000),
        (read_traces, b'{"a":\n[', b"{},", 60, 40_000_000),
        (read_traces, b'{"a": [', b"{},", 60, 40_000_000),
        (lambda stream, _: values_read(stream), b"[[", b"{},", 12, 44_000_000),
        (lambda stream, _: values_read(stream), b'{"data":\n[', b"{},", 12, 44_000_000),
    ],
)
def test_gzip_bomb_takes_no_more_memory_than_its_bytes(
    read_all: Callable[..., Any], opening: bytes, piece: bytes, megabytes: int, peak_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kp_scorer.cli.framing.MOST_BYTES", megabytes * 5 // 6 * 1_000_000)
    deflate = zlib.compressobj(1, wbits=31)
    repeated = piece * (1_000_000 // len(piece))
    bomb = deflate.compress(opening) + b"".join(deflate.compress(repeated) for _ in range(megabytes)) + deflate.flush()
    stream = io.BufferedReader(io.BytesIO(bomb))
    with traced_memory() as memory, suppress(click.BadParameter):
        assert [isinstance(result[1], InvalidTrace) for result in read_all(stream, LIMITS)] == [True]
    assert memory.peak_bytes < peak_bytes


BATCH_SIZE: Final = 10


def line_of(number: int, objective: str = "count") -> bytes:
    return json.dumps(minimal_payload(trace_id=f"kp:trace:{number}", objective=objective)).encode() + b"\n"


def reading_of(directory: Path, count: int, objective: str = "count") -> ReadAhead:
    """Write a file with ``count`` lines, and open it for reading ahead."""
    file = directory / "traces.jsonl"
    file.write_bytes(b"".join(line_of(number, objective) for number in range(count)))
    return ReadAhead([str(file)], LIMITS, BATCH_SIZE)


def numbers(reading: ReadAhead) -> list[list[int]]:
    return [[each.number for each in batch] for batch in reading.batches()]


def test_files_are_read_in_full_batches_and_large_lines_make_smaller_ones(tmp_path: Path) -> None:
    assert numbers(reading_of(tmp_path, 25)) == [list(range(1, 11)), list(range(11, 21)), list(range(21, 26))]
    assert numbers(reading_of(tmp_path, 12, "x" * 1_000_000)) == [list(range(1, 6)), list(range(6, 11)), [11, 12]]


def test_read_ahead_holds_one_batch_at_most(tmp_path: Path) -> None:
    reading = reading_of(tmp_path, 35)
    batches = reading.batches()
    for _ in range(2):
        assert len(next(batches)) == BATCH_SIZE
        wait_until(lambda: len(reading._lines) == BATCH_SIZE)
    assert [len(batch) for batch in batches] == [BATCH_SIZE, 5]


def test_input_error_is_raised_after_the_lines_before_it(tmp_path: Path) -> None:
    file = tmp_path / "traces.jsonl.gz"
    file.write_bytes(gzip.compress(line_of(0)) + gzip.compress(line_of(1))[:-40])
    batches = ReadAhead([str(file)], LIMITS, BATCH_SIZE).batches()
    assert len(next(batches)) == 1
    with pytest.raises(click.BadParameter, match="cut off"):
        next(batches)
