"""Traces from files, folders and standard input: JSON Lines or JSON documents, gzipped or not. Read ahead by a thread.

What others recorded is converted on the way, if the command does that.
"""

import codecs
import gzip
import io
import json
import re
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, cast

import click

from kp_scorer.adapters import FORMATS, format_of
from kp_scorer.characters import escaped
from kp_scorer.cli.converting import Conversion, Line
from kp_scorer.cli.output import print_note
from kp_scorer.decoding import Limits, check_trace, check_values, decode_trace, parse_json, parsed_or_refused
from kp_scorer.errors import InvalidTrace, Problem, UnknownFormat

_OTHER_FORMAT: Final = re.compile(rb'.{,16}[\0-\x08\x0e-\x1f].*|"?[A-Za-z][\w .-]*+"?+(?:[,;\t]"?+[\w .-]*+"?+)++', re.DOTALL)
"""What JSON does not begin with: bytes of no text, as in compressed files or UTF-16; or the names of columns."""
_AROUND_BYTES: Final = 4_096  # How much may stand around a trace on its line: spaces, the end of the line.
_SPREAD: Final = 8  # How many times as long as on one line a trace of a document may be, by its indentation.
_MOST_BYTES: Final = 2**28
"""How far the end of a line is looked for; and what a list of traces, or JSON that is not traces, may have."""
_MOST_VALUES: Final = 2**22  # Of the same: a value may take a hundred bytes of memory.
_SUFFIXES: Final = (".json", ".jsonl", ".ndjson", ".traj")
_FIELD_OF_OTHERS: Final = re.compile(
    rb"\b(resourceSpans|trace_?[iI]d|observations|messages|contents|input|output|request|response|trajectory|steps|payload|data)\b"
)
_FIELD_OF_TRACES: Final = re.compile(rb"""(?<!\\)"@(type|context)"\s*:""")
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # Or cut off: from there on nothing is outside.
_CONVERT: Final = "what others recorded: `kp-scorer convert` makes traces of it"
_UNKNOWN: Final = (
    f"neither a trace, as `kp-scorer schema trace` describes, nor in one of the formats that `kp-scorer convert` reads by "
    f"their shapes: {', '.join(FORMATS)}"
)
_OF_DOCUMENTS: Final = {"message_bytes": _MOST_BYTES, "values": _MOST_VALUES}
_AHEAD_BYTES: Final = 4_194_304  # How much is read ahead: a batch of traces of a few kilobytes, or a few large ones.


def read_files(names: Sequence[str], limits: Limits, conversion: Conversion | None = None) -> Iterator[Line]:
    """The lines of several files, one file after the other, of a folder those of JSON, however deep; ``-`` is standard input.

    Of several files one that cannot be read is an error among the lines. Otherwise it raises as :func:`read_traces` does.
    """
    files = [file for name in names for file in _files_in(name)]
    for name in files:
        place = name if len(files) > 1 else ""
        with open_input(name) as stream:
            if conversion:
                conversion.begin_file(place)
            try:
                for line in read_traces(stream, limits, conversion):
                    yield line if line.file else line._replace(file=place)
            except click.BadParameter as error:
                if not place:
                    raise
                yield Line(0, InvalidTrace([Problem("$", error.message)]), file=place)
        if conversion:
            yield from conversion.end_file()
    if conversion:
        yield from conversion.end()


def _files_in(name: str) -> list[str]:
    """The file of this name; the files of JSON in the folder of this name, however deep, in their order."""
    if name == "-" or not Path(name).is_dir():
        return [name]
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    readable = [str(path) for path in files if path.name.removesuffix(".gz").endswith(_SUFFIXES)]
    if others := len(files) - len(readable):
        print_note(f"{name}: not read: {others} with other names than *{', *'.join(_SUFFIXES)} and these with .gz")
    return readable


def open_input(name: str) -> io.BufferedReader:
    """Open a file for reading, or standard input for ``-``, with a buffer of ours: Python aborts if a thread reads its own."""
    try:
        return open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-")
    except OSError as error:
        raise click.BadParameter(escaped(f"{name}: {error.strerror}"), param_hint="FILE") from None


def read_traces(stream: io.BufferedReader, limits: Limits, conversion: Conversion | None = None) -> Iterator[Line]:
    """Decode traces one by one, as they come in, and convert what others recorded; blank lines are skipped.

    If the first line begins an object or a list that ends on a later one, the input is documents, of which each ends where its
    brackets do; else each line is one. Of a line no more is held than a trace may have, unless it may be a list, or what others
    record: that may have 256 MiB. Where the first is a list with a trace in it, its items are read. A gzip file is unpacked as
    it comes in; sizes are of its contents.

    Raises:
        BadParameter: the input is in another format, cannot be read, or the end of a trace is not found.
        UsageError: what converting needs is not supplied.
    """
    stream = unpacked(stream)
    first, line = _first_line(stream, limits.message_bytes)
    if line.startswith(b"[") or _may_be_large(line):
        line = _entire(stream, line)
    most_bytes, read = limits.message_bytes, _lines
    if _is_document(stream, line):
        most_bytes, read = _SPREAD * limits.message_bytes, _documents
    for number, raw, size_bytes in read(stream, first, line, most_bytes):
        if size_bytes > len(raw):
            problem = Problem("$", f"expected at most {most_bytes} bytes, got {size_bytes}")
            yield Line(number, InvalidTrace([problem]), len(raw))
            continue
        own = _decoded(number, raw.strip(), limits, most_bytes) if _FIELD_OF_TRACES.search(raw) else None
        if own and not isinstance(own.trace, InvalidTrace):
            yield own
            continue
        value = parsed_or_refused(raw.strip(), limits.model_copy(update=_OF_DOCUMENTS))
        if isinstance(value, InvalidTrace) or (own and _is_trace(value)):
            yield own or Line(number, cast("InvalidTrace", value), len(raw))
        elif number == first and isinstance(value, list) and (not value or any(map(_is_trace, value))):
            for item, each in enumerate(value, start=1):
                yield from _read(item, each, limits, conversion)
        else:
            yield from _read(number, value, limits, conversion)


class _AvailableBytes:
    """Passes gzip the bytes that have arrived. Up to CPython 3.14 it asks for 8 KiB or more, and would wait for all of them."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, most_bytes: int) -> Any:
        # The magic number is read in one call, and must not be cut.
        return self._stream.read(most_bytes) if most_bytes <= 2 else self._stream.read1(most_bytes)


def unpacked(stream: io.BufferedReader) -> io.BufferedReader:
    """The stream, or its decompressed content if it is a gzip file, of which no more is held than is asked for."""
    # No JSON begins with this byte, the first of gzip's two.
    if read_bytes(stream.peek, 1).startswith(b"\x1f"):
        stream = gzip.GzipFile(mode="rb", fileobj=_AvailableBytes(stream))  # type: ignore[call-overload]  # it seeks only if asked to
    return stream


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


def lines_in(stream: IO[bytes], most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, with their numbers; what is longer comes in pieces of so many bytes, each as a line."""
    for number, line in enumerate(iter(lambda: read_bytes(stream.readline, most_bytes), b""), 1):
        if not line.isspace():
            yield number, line


def _first_line(stream: IO[bytes], most_bytes: int) -> tuple[int, bytes]:
    """The first line that is not blank, as far as ``_lines`` holds it, with its number; refuses other formats than JSON."""
    number, line = 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)
    line = line.removeprefix(codecs.BOM_UTF8)
    if _OTHER_FORMAT.fullmatch(line.rstrip()):
        raise click.BadParameter("expected JSON Lines or one JSON document, in UTF-8, gzipped or not", param_hint="FILE")
    while line.isspace():
        number, line = number + 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)
    return number, line.lstrip()


def _is_document(stream: io.BufferedReader, line: bytes) -> bool:
    """Whether JSON begins on this line and ends on a later one; if not, this may be the first of several lines, and cut off."""
    try:
        check_values(line, _MOST_VALUES)
        json.loads(line)
    except json.JSONDecodeError as error:
        text = line.rstrip()
        if error.pos < len(text.decode(errors="replace")) or not line.endswith(b"\n"):
            return False
        goes_on = line.startswith(b"[") or text.endswith((b"{", b"[", b",", b":"))
        return goes_on or (line.startswith(b"{") and read_bytes(stream.peek, 1)[:1] != b"{")
    except (InvalidTrace, ValueError):
        pass
    return False


def _lines(stream: IO[bytes], number: int, line: bytes, most_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """This line and those after it that are not blank: their numbers, so many bytes and a little of each, and their sizes."""
    while line:
        if not line.endswith(b"\n") and _may_be_large(line):
            line = _entire(stream, line)
        size_bytes, piece = len(line), line
        while piece and not piece.endswith(b"\n"):
            piece = read_bytes(stream.readline, _AROUND_BYTES)
            size_bytes += len(piece)
            if size_bytes > _MOST_BYTES + len(line):
                raise click.BadParameter(f"line {number}: expected its end within {_MOST_BYTES} bytes", param_hint="FILE")
        if size_bytes > len(line) or not line.isspace():
            yield number, line, size_bytes
        number, line = number + 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)


def _documents(stream: IO[bytes], number: int, line: bytes, most_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """The documents that begin with this line: the number of the first line of each, its bytes, and its size."""
    while line:
        first, pieces, size_bytes, depth = number, list[bytes](), 0, 0
        is_large = line.startswith(b"[")
        while line:
            is_large = is_large or (size_bytes + len(line) > most_bytes and _may_be_large(b"".join([*pieces, line])))
            line = _entire(stream, line) if is_large else line
            pieces.append(line)
            size_bytes += len(line)
            if size_bytes > (_MOST_BYTES if is_large else most_bytes):
                yield first, b"", size_bytes
                return
            outside = _QUOTED.sub(b"", line)
            depth += outside.count(b"{") + outside.count(b"[") - outside.count(b"}") - outside.count(b"]")
            number += 1
            if depth <= 0:
                break
            line = read_bytes(stream.readline, most_bytes + 1)
        if depth > 0 and pieces[0].startswith(b"{") and pieces[1:] and pieces[1].startswith(b"{"):
            # The line is cut off, and others follow it.
            yield first, pieces[0], len(pieces[0])
            yield from _lines(io.BytesIO(b"".join(pieces[2:])), first + 1, pieces[1], most_bytes)
        elif not (document := b"".join(pieces)).isspace():
            yield first, document, size_bytes
        line = read_bytes(stream.readline, most_bytes + 1)


def _may_be_large(beginning: bytes) -> bool:
    """Whether what begins so is something that others record, which may be larger than a trace."""
    return _FIELD_OF_TRACES.search(beginning) is None and _FIELD_OF_OTHERS.search(beginning) is not None


def _entire(stream: IO[bytes], line: bytes) -> bytes:
    """The line of which this is the beginning, up to a limit."""
    return line if line.endswith(b"\n") else line + read_bytes(stream.readline, max(0, _MOST_BYTES + 1 - len(line)))


def _is_trace(value: object) -> bool:
    return isinstance(value, dict) and ("@type" in value or "@context" in value)


def _read(number: int, value: object, limits: Limits, conversion: Conversion | None) -> Iterator[Line]:
    """The trace that a value is, or what it is converted to."""
    if _is_trace(value):
        document = cast("dict[str, Any]", value)
        try:
            yield Line(number, decode_trace(document, limits), document=document)
        except InvalidTrace as error:
            yield Line(number, error)
    elif conversion and conversion.fits(value):
        yield from conversion.feed(number, value)
    else:
        yield Line(number, UnknownFormat([Problem("$", _CONVERT if format_of(value) else _UNKNOWN)]))


def _decoded(number: int, raw: bytes, limits: Limits, most_bytes: int) -> Line:
    """Decode a trace that has so many bytes at most, as it stands there; without its indentation ``limits`` apply."""
    try:
        document = cast("dict[str, Any]", parse_json(raw, limits.model_copy(update={"message_bytes": most_bytes})))
        check = check_trace if most_bytes == limits.message_bytes else decode_trace
        return Line(number, check(document, limits), len(raw), document)
    except InvalidTrace as error:
        return Line(number, error, len(raw))


class ReadAhead:
    """Reads an input in a thread of its own, a batch ahead and no further; lines that have arrived are available at once."""

    def __init__(self, names: Sequence[str], limits: Limits, most: int, conversion: Conversion | None = None) -> None:
        """Begin to read files, folders, or standard input for ``-``; a batch has ``most`` lines at most."""
        self._most = most
        self._changed = threading.Condition()
        self._lines: list[Line] = []
        self._wanted = 1  # How many lines to wait for; 0 once there are no more.
        self._error: BaseException | None = None
        # A daemon: nothing interrupts a thread that waits for input.
        threading.Thread(target=self._run, args=[names, limits, conversion], name="kp-scorer-reader", daemon=True).start()

    def batches(self) -> Iterator[list[Line]]:
        """Yield the lines that have arrived, a batch at most, waiting only while there are none; from a file, full batches.

        Raises:
            BadParameter: as by :func:`read_traces`, or the input cannot be opened; after the lines before.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_full() or len(self._lines) >= self._wanted)
                batch, self._lines = self._lines, []
                self._changed.notify_all()
            if not batch:
                break
            yield batch
        if self._error:
            raise self._error

    def _is_full(self) -> bool:
        return len(self._lines) >= self._most or sum(line.size_bytes for line in self._lines) >= _AHEAD_BYTES

    def _run(self, names: Sequence[str], limits: Limits, conversion: Conversion | None) -> None:
        try:
            if all(name != "-" and (Path(name).is_file() or Path(name).is_dir()) for name in names):
                # A file never blocks. In full batches it is scored faster, and the same each time.
                self._wanted = self._most
            for line in read_files(names, limits, conversion):
                with self._changed:
                    self._changed.wait_for(lambda: not self._is_full())
                    self._lines.append(line)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._wanted = 0
            self._changed.notify_all()
