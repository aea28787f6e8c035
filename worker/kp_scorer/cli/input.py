"""Reads traces from files, folders and standard input: JSON Lines or JSON documents. A thread reads ahead.

Logs of other tools are converted on the way, if the command does that.
"""

import codecs
import io
import json
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import IO, Any, Final, cast

import click

from kp_scorer.adapters import format_of
from kp_scorer.characters import escaped
from kp_scorer.cli.converting import MOST_PLACES, UNKNOWN, Conversion, Line
from kp_scorer.cli.output import print_note
from kp_scorer.cli.unpacking import open_input, read_bytes, unpacked
from kp_scorer.decoding import Limits, check_trace, check_values, decode_trace, parse_json, parsed_or_refused
from kp_scorer.errors import InvalidTrace, Problem, UnknownFormat

_OTHER_FORMAT: Final = re.compile(rb'.{,16}[\0-\x08\x0e-\x1f].*|"?[A-Za-z][\w .-]*+"?+(?:[,;\t]"?+[\w .-]*+"?+)++', re.DOTALL)
"""A first line that is no JSON: bytes that are no text, as in other compressed files or UTF-16, or the names of columns."""
_AROUND_BYTES: Final = 4_096  # The white space around a trace on its line, its end included.
_SPREAD: Final = 8  # A trace in an indented document may be this many times as long as on one line.
_MOST_BYTES: Final = 2**28
"""The size of the longest line that is skipped, and the limit for a list of traces or for JSON that is not traces."""
_MOST_VALUES: Final = 2**22  # The limit on the values of such a list or JSON: each may take a hundred bytes of memory.
_SUFFIXES: Final = (".json", ".jsonl", ".ndjson", ".jl", ".traj")
_MOST_SUFFIXES: Final = 5
_FIELD_OF_OTHERS: Final = re.compile(
    rb"\b(resourceSpans|trace_?[iI]d|observations|messages|contents|input|output|request|response|trajectory|steps|payload|data)\b"
)
_FIELD_OF_TRACES: Final = re.compile(rb"""(?<!\\)"@(type|context)"\s*:""")
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # A string that is cut off extends to the end.
_CONVERT: Final = "a log of another tool: `kp-scorer convert` makes traces of it"
_OF_DOCUMENTS: Final = {"message_bytes": _MOST_BYTES, "values": _MOST_VALUES}
_AHEAD_BYTES: Final = 4_194_304  # The most bytes to read ahead: a batch of traces of a few kilobytes, or a few large ones.


def read_files(names: Sequence[str], limits: Limits, conversion: Conversion | None = None) -> Iterator[Line]:
    """Yield the lines of files, one file after another; of a folder, those of all its JSON files; ``-`` is standard input.

    If one of several files cannot be read, the error is one of the lines. Otherwise this raises the errors of
    :func:`read_traces`.
    """
    files = [file for name in names for file in _files_in(name)]
    for name in files:
        place = name if len(files) > 1 or name not in names else ""
        try:
            with open_input(name) as stream:
                if conversion:
                    conversion.begin_file(place, _written_at(stream))
                for line in _reported_together(read_traces(stream, limits, conversion)):
                    yield line if line.file else line._replace(file=place)
        except click.BadParameter as error:
            if not place:
                raise
            yield Line(0, InvalidTrace([Problem("$", error.message)]), file=place)
        if conversion:
            yield from conversion.end_file()
    if conversion:
        yield from conversion.end()


def _reported_together(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines; of those that follow each other and are nothing that is read here, only the first, to report them all."""
    for is_unknown, group in groupby(lines, key=lambda line: isinstance(line.trace, UnknownFormat)):
        if not is_unknown:
            yield from group
            continue
        first = next(group)
        numbers, count = [first.number], 1
        for count, line in enumerate(group, 2):
            numbers += [line.number] if count <= MOST_PLACES else []
        yield first._replace(trace=UnknownFormat(cast("UnknownFormat", first.trace).problems, numbers, count))


def _written_at(stream: io.BufferedReader) -> str | None:
    """Return when a file was written, as ISO 8601; None for a pipe or a terminal."""
    status = os.fstat(stream.fileno())
    return datetime.fromtimestamp(int(status.st_mtime), UTC).isoformat() if stat.S_ISREG(status.st_mode) else None


def _files_in(name: str) -> list[str]:
    """Return the file of this name, or the JSON files in the folder of this name and its subfolders, sorted."""
    if name == "-" or not Path(name).is_dir():
        return [name]
    files = sorted(path for path in Path(name).rglob("*") if path.is_file())
    readable = [str(path) for path in files if _suffix_of(path) in _SUFFIXES]
    if others := Counter(_suffix_of(path) or "no suffix" for path in files if _suffix_of(path) not in _SUFFIXES):
        names = ", ".join(f"{count} {escaped(suffix)}" for suffix, count in others.most_common(_MOST_SUFFIXES))
        more = " and others" if len(others) > _MOST_SUFFIXES else ""
        print_note(f"{name}: not read: {names}{more}; only {', '.join(_SUFFIXES)} are, also with .gz or .zst")
    return readable


def _suffix_of(path: Path) -> str:
    """Return what the name of a file ends in, in lower case and without what compression added."""
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix


def read_traces(stream: io.BufferedReader, limits: Limits, conversion: Conversion | None = None) -> Iterator[Line]:
    """Decode traces one by one as they arrive, and convert logs of other tools; skip blank lines.

    If the first line begins an object or a list that ends on a later line, the input is a series of documents, each of which
    ends where its brackets close; otherwise each line is a document. If the first document is a list with a trace in it, its
    items are read. A trace may have ``limits.message_bytes``, and no more of its line is held in memory; a list, or the log of
    another tool, may have 256 MiB. A compressed file is unpacked as it is read, and all sizes are those of its content.

    Raises:
        BadParameter: the input is in another format, or cannot be read, or the end of a line is not found.
        UsageError: an option that converting needs is missing.
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
        # A file that was put together of several may have byte order marks within it.
        raw = raw.strip().removeprefix(codecs.BOM_UTF8).lstrip()
        own = _decoded(number, raw, limits, most_bytes) if _FIELD_OF_TRACES.search(raw) else None
        if own and not isinstance(own.trace, InvalidTrace):
            yield own
            continue
        value = parsed_or_refused(raw, limits.model_copy(update=_OF_DOCUMENTS))
        if isinstance(value, InvalidTrace) and not own and not raw.startswith((b"{", b"[")):
            yield Line(number, UnknownFormat(value.problems, [number]), len(raw))
        elif isinstance(value, InvalidTrace) or (own and _is_trace(value)):
            yield own or Line(number, cast("InvalidTrace", value), len(raw))
        elif number == first and isinstance(value, list) and (not value or any(map(_is_trace, value))):
            for item, each in enumerate(value, start=1):
                yield from _read(item, each, limits, conversion)
        else:
            yield from _read(number, value, limits, conversion)


def _first_line(stream: IO[bytes], most_bytes: int) -> tuple[int, bytes]:
    """Return the first line that is not blank, as far as ``_lines`` holds it, and its number; refuse other formats."""
    number, line = 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)
    line = line.removeprefix(codecs.BOM_UTF8)
    if _OTHER_FORMAT.fullmatch(line.rstrip()):
        raise click.BadParameter(
            "expected JSON Lines or one JSON document, in UTF-8, or that by gzip or Zstandard", param_hint="FILE"
        )
    while line.isspace():
        number, line = number + 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)
    return number, line.lstrip()


def _is_document(stream: io.BufferedReader, line: bytes) -> bool:
    """Return whether JSON begins on this line and ends on a later one. False for a first line that is cut off before others."""
    try:
        check_values(line, _MOST_VALUES)
        json.loads(line)
    except json.JSONDecodeError as error:
        text = line.rstrip()
        if error.pos < len(text.decode(errors="replace")) or not line.endswith(b"\n"):
            return False
        return text.startswith(b"[") or text.endswith(b"[") or read_bytes(stream.peek, 1)[:1] != b"{"
    except (InvalidTrace, ValueError):
        pass
    return False


def _lines(stream: IO[bytes], number: int, line: bytes, most_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield the number, about the first ``most_bytes`` and the size of this line and of each later one that is not blank."""
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
    """Yield for each document from this line on the number of its first line, its bytes and their size.

    A document ends on the line where its brackets close. Counting them outside of strings takes linear time, reads nothing
    beyond the document, and finds the next document behind one that is not JSON; with a parser, each line would need another
    attempt.
    """
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
        if not (document := b"".join(pieces)).isspace():
            yield first, document, size_bytes
        line = read_bytes(stream.readline, most_bytes + 1)


def _may_be_large(beginning: bytes) -> bool:
    """Return whether this may be the beginning of a log of another tool, which may be larger than a trace."""
    return _FIELD_OF_TRACES.search(beginning) is None and _FIELD_OF_OTHERS.search(beginning) is not None


def _entire(stream: IO[bytes], line: bytes) -> bytes:
    """Read the rest of a line, up to a limit, and return all of it."""
    return line if line.endswith(b"\n") else line + read_bytes(stream.readline, max(0, _MOST_BYTES + 1 - len(line)))


def _is_trace(value: object) -> bool:
    return isinstance(value, dict) and ("@type" in value or "@context" in value)


def _read(number: int, value: object, limits: Limits, conversion: Conversion | None) -> Iterator[Line]:
    """Yield a value that is a trace, or the traces that it is converted to."""
    if _is_trace(value):
        document = cast("dict[str, Any]", value)
        try:
            yield Line(number, decode_trace(document, limits), document=document)
        except InvalidTrace as error:
            yield Line(number, error)
    elif conversion:
        yield from conversion.feed(number, value)
    else:
        yield Line(number, UnknownFormat([Problem("$", _CONVERT if format_of(value) else UNKNOWN)], [number]))


def _decoded(number: int, raw: bytes, limits: Limits, most_bytes: int) -> Line:
    """Decode a trace that is written in at most ``most_bytes``; ``limits`` apply to it without its indentation."""
    try:
        document = cast("dict[str, Any]", parse_json(raw, limits.model_copy(update={"message_bytes": most_bytes})))
        check = check_trace if most_bytes == limits.message_bytes else decode_trace
        return Line(number, check(document, limits), len(raw), document)
    except InvalidTrace as error:
        return Line(number, error, len(raw))


class ReadAhead:
    """Reads an input in a thread of its own, one batch ahead; lines are available as soon as they have arrived."""

    def __init__(self, names: Sequence[str], limits: Limits, most: int, conversion: Conversion | None = None) -> None:
        """Begin to read files, folders, or standard input for ``-``, in batches of ``most`` lines at most."""
        self._most = most
        self._changed = threading.Condition()
        self._lines: list[Line] = []
        self._wanted = 1  # The number of lines to wait for; 0 once there are no more.
        self._error: BaseException | None = None
        # A daemon thread, because nothing interrupts a thread that waits for input.
        threading.Thread(target=self._run, args=[names, limits, conversion], name="kp-scorer-reader", daemon=True).start()

    def batches(self) -> Iterator[list[Line]]:
        """Yield the lines that have arrived, a batch at most; wait only if there are none, and for full batches of files.

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
                # A file never blocks. Full batches are scored faster, and every time alike.
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
