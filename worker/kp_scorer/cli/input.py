"""Traces from a file or standard input: JSON Lines, or one JSON document; either may be gzipped. Read ahead by a thread."""

import codecs
import gzip
import io
import json
import os
import re
import stat
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import IO, Any, Final, NamedTuple, cast

import click

from kp_scorer.characters import escaped
from kp_scorer.decoding import Limits, check_trace, check_values, decode_trace, parse_json
from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.trace import ReasoningTrace

_OTHER_FORMAT: Final = re.compile(rb'.{,16}[\0-\x08\x0e-\x1f].*|"?[A-Za-z][\w .-]*"?([,;\t]"?[\w .-]*"?)+', re.DOTALL)
"""What JSON does not begin with: bytes of no text, as in compressed files or UTF-16; or the names of columns."""
_AROUND_BYTES: Final = 4_096
"""How much may stand around a trace on its line: spaces, the end of the line."""
_SPREAD: Final = 8
"""How many times as long as on one line a trace of a document may be, by its indentation."""
_MOST_BYTES: Final = 2**28
"""How far the end of a line is looked for; and what a list of traces, or JSON that is not traces, may have."""
_MOST_VALUES: Final = 2**22
"""Of the same: a value may take a hundred bytes of memory."""
_OF_DOCUMENTS: Final = {"message_bytes": _MOST_BYTES, "values": _MOST_VALUES}
_AHEAD_BYTES: Final = 4_194_304
"""How much is read ahead: a batch of traces of a few kilobytes, or a few large ones."""


class Line(NamedTuple):
    """One trace of the input, or the error in it. ``number`` counts lines, or a list's items, from 1."""

    number: int
    trace: ReasoningTrace | InvalidTrace
    size_bytes: int = 0
    document: Mapping[str, Any] = MappingProxyType({})
    """The trace as it was read, also its fields that are ignored; empty in place of an error."""


@contextmanager
def open_input(name: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, or standard input for ``-``."""
    if name == "-":
        yield _own_stdin()
        return
    try:
        opened = click.open_file(name, "rb")
    except OSError as error:
        raise click.BadParameter(escaped(f"{name}: {error.strerror}"), param_hint="FILE") from None
    with opened as stream:
        yield stream


def _own_stdin() -> IO[bytes]:
    """Standard input with a buffer of ours: Python aborts at exit if a thread still reads from its own."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        # A test replaced it by a stream without a file.
        return sys.stdin.buffer


def read_traces(stream: IO[bytes], limits: Limits) -> Iterator[Line]:
    """Decode traces one by one, as they come in; blank lines are skipped.

    Input whose first line begins a list is a list of traces, of 256 MiB at most; if it begins an object that ends on a later
    line, that is the only trace. Of lines one is held, and no more of it than a trace may have. A gzip file is unpacked as it
    comes in; sizes are of its contents.

    Raises:
        BadParameter: the input is in another format, cannot be read, or the end of a trace is not found.
    """
    stream = unpacked(stream)
    first, line = _first_line(stream, limits.message_bytes)
    if line.startswith(b"["):
        yield from _items(line + read_bytes(stream.read, _MOST_BYTES), limits)
    elif _is_document(stream, line, limits.values):
        most_bytes = _SPREAD * limits.message_bytes
        document = line + read_bytes(stream.read, most_bytes)
        yield _decoded(first, document, limits, most_bytes)
    else:
        for number, raw, size_bytes in _lines(stream, first, line, limits.message_bytes):
            if size_bytes > len(raw):
                yield Line(number, _too_long(size_bytes, limits.message_bytes), len(raw))
            else:
                yield _decoded(number, raw.strip(), limits, limits.message_bytes)


def read_json(stream: IO[bytes], limits: Limits) -> Iterator[tuple[int, object | InvalidTrace]]:
    """Parse JSON of any kind: each value with the line on which it begins, or InvalidTrace for what is no JSON.

    Lines and documents are distinguished as by :func:`read_traces`, except that a list is one value, and several lines may be
    one each. Any may have 256 MiB; of the limits only the depth counts.

    Raises:
        BadParameter: as by :func:`read_traces`.
    """
    stream = unpacked(stream)
    limits = limits.model_copy(update=_OF_DOCUMENTS)
    first, line = _first_line(stream, _MOST_BYTES)
    if _is_document(stream, line, _MOST_VALUES):
        following = read_bytes(stream.read, _MOST_BYTES)
        value = _parsed(line + following, limits)
        if not (isinstance(value, InvalidTrace) and following.startswith(b"{")):
            yield first, value
            return
        # The line is cut off, and others follow it.
        stream = io.BufferedReader(io.BytesIO(following))
    for number, raw, size_bytes in _lines(stream, first, line, _MOST_BYTES):
        yield number, _too_long(size_bytes, _MOST_BYTES) if size_bytes > len(raw) else _parsed(raw, limits)


class _AvailableBytes:
    """Passes gzip the bytes that have arrived. Up to CPython 3.14 it asks for 8 KiB or more, and would wait for all of them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, most_bytes: int) -> Any:
        # The magic number is read in one call, and must not be cut.
        return self._stream.read(most_bytes) if most_bytes <= 2 else self._stream.read1(most_bytes)


def unpacked(stream: IO[bytes]) -> io.BufferedReader:
    """The stream, or its decompressed content if it is a gzip file, of which no more is held than is asked for."""
    buffered = stream if hasattr(stream, "peek") else io.BufferedReader(io.BytesIO(stream.read()))
    # No JSON begins with this byte, the first of gzip's two.
    if read_bytes(buffered.peek, 1).startswith(b"\x1f"):
        buffered = gzip.GzipFile(mode="rb", fileobj=_AvailableBytes(buffered))  # type: ignore[call-overload]  # it seeks only if asked to
    return cast("io.BufferedReader", buffered)


def read_bytes(read: Callable[[int], bytes], most_bytes: int) -> bytes:
    """Read from a method of an input's stream; raises BadParameter if that fails."""
    try:
        return read(most_bytes)
    except EOFError:
        reason: str | None = "a gzip file that is cut off"
    except (gzip.BadGzipFile, zlib.error):
        reason = "a gzip file that is damaged"
    except OSError as error:
        reason = error.strerror
    raise click.BadParameter(f"it cannot be read: {reason}", param_hint="FILE")


def _first_line(stream: IO[bytes], most_bytes: int) -> tuple[int, bytes]:
    """The first line that is not blank, as far as ``_lines`` holds it, with its number; refuses other formats than JSON."""
    number, line = 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)
    line = line.removeprefix(codecs.BOM_UTF8)
    if _OTHER_FORMAT.fullmatch(line.rstrip()):
        raise click.BadParameter("expected JSON Lines or one JSON document, in UTF-8, gzipped or not", param_hint="FILE")
    while line.isspace():
        number, line = number + 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)
    return number, line.lstrip()


def _is_document(stream: io.BufferedReader, line: bytes, most_values: int) -> bool:
    """Whether JSON begins on this line and ends on a later one; if not, this may be the first of several lines, and cut off."""
    try:
        check_values(line, most_values)
        json.loads(line)
    except json.JSONDecodeError as error:
        text = line.rstrip()
        if error.pos < len(text.decode(errors="replace")) or not line.endswith(b"\n"):
            return False
        goes_on = line.startswith(b"[") or text.endswith((b"{", b"[", b",", b":"))
        return goes_on or (line.startswith(b"{") and read_bytes(stream.peek, 1)[:1] != b"{")
    except (InvalidTrace, ValueError, RecursionError):
        pass
    return False


def _lines(stream: IO[bytes], number: int, line: bytes, most_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """This line and those after it that are not blank: their numbers, so many bytes and a little of each, and their sizes."""
    while line:
        size_bytes, piece = len(line), line
        while piece and not piece.endswith(b"\n"):
            piece = read_bytes(stream.readline, _AROUND_BYTES)
            size_bytes += len(piece)
            if size_bytes > _MOST_BYTES + len(line):
                raise click.BadParameter(f"line {number}: expected its end within {_MOST_BYTES} bytes", param_hint="FILE")
        if size_bytes > len(line) or not line.isspace():
            yield number, line, size_bytes
        number, line = number + 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)


def _items(document: bytes, limits: Limits) -> Iterator[Line]:
    """Decode the items of a list, of which each may have what a trace may."""
    items = _parsed(document, limits.model_copy(update=_OF_DOCUMENTS))
    if isinstance(items, InvalidTrace):
        yield Line(1, items)
        return
    assert isinstance(items, list)
    for number, item in enumerate(items, start=1):
        try:
            yield Line(number, decode_trace(item, limits), document=item)
        except InvalidTrace as error:
            yield Line(number, error)


def _decoded(number: int, raw: bytes, limits: Limits, most_bytes: int) -> Line:
    """Decode a trace that has so many bytes at most, as it stands there; without its indentation ``limits`` apply."""
    try:
        document = cast("dict[str, Any]", parse_json(raw, limits.model_copy(update={"message_bytes": most_bytes})))
        check = check_trace if most_bytes == limits.message_bytes else decode_trace
        return Line(number, check(document, limits), len(raw), document)
    except InvalidTrace as error:
        return Line(number, error, len(raw))


def _parsed(raw: bytes, limits: Limits) -> object | InvalidTrace:
    try:
        return parse_json(raw, limits)
    except InvalidTrace as error:
        return error


def _too_long(size_bytes: int, most_bytes: int) -> InvalidTrace:
    return InvalidTrace([Problem("$", f"expected at most {most_bytes} bytes, got {size_bytes}")])


class ReadAhead:
    """Reads and decodes an input in a thread of its own, a batch ahead and no further.

    Lines that have arrived are available at once, and nothing waits for further ones.
    """

    def __init__(self, name: str, limits: Limits, most: int) -> None:
        """Begin to read the file, or standard input for ``-``; a batch has ``most`` lines at most."""
        self._most = most
        self._changed = threading.Condition()
        self._lines: deque[Line] = deque()
        self._size_bytes = 0
        self._wanted = 1
        self._read = 0
        self._total: int | None = None
        self._is_ended = self._is_closed = False
        self._error: BaseException | None = None
        # A daemon: nothing interrupts a thread that waits for input.
        threading.Thread(target=self._run, args=[name, limits], name="kp-scorer-reader", daemon=True).start()

    def batches(self) -> Generator[list[Line], None, None]:
        """Yield the lines that have arrived, a batch at most, waiting only while there are none; from a file, full batches.

        Raises:
            BadParameter: as by :func:`read_traces`, or the input cannot be opened; after the lines before.
        """
        try:
            while batch := self._next_batch():
                yield batch
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def total(self) -> int | None:
        """How many lines there will be, estimated by the size of the file; None while that is unknown."""
        return self._total

    def _next_batch(self) -> list[Line]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_ended or self._is_full() or len(self._lines) >= self._wanted)
            batch = [self._lines.popleft() for _ in range(min(self._most, len(self._lines)))]
            self._size_bytes -= sum(line.size_bytes for line in batch)
            self._changed.notify_all()
            if not batch and self._error:
                raise self._error
            return batch

    def _is_full(self) -> bool:
        return len(self._lines) >= self._most or self._size_bytes >= _AHEAD_BYTES

    def _run(self, name: str, limits: Limits) -> None:
        try:
            with open_input(name) as stream:
                self._put_all(read_traces(stream, limits), stream)
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_ended = True
            self._total = self._read
            self._changed.notify_all()

    def _put_all(self, lines: Iterator[Line], stream: IO[bytes]) -> None:
        size_bytes = _file_bytes(stream)
        # A file never blocks. In full batches it is scored faster, and the same each time.
        self._wanted = self._most if size_bytes else 1
        for line in lines:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or not self._is_full())
                if self._is_closed:
                    return
                self._lines.append(line)
                self._size_bytes += line.size_bytes
                self._read += 1
                if size_bytes and (position := stream.tell()) < size_bytes:
                    self._total = max(self._read, self._read * size_bytes // position)
                self._changed.notify_all()


def _file_bytes(stream: IO[bytes]) -> int:
    """The size of the file that a stream reads; 0 if it reads none."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
