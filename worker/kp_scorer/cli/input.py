"""Traces from a file or standard input: JSON Lines, or one JSON document; either may be gzipped."""

import codecs
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Final, NamedTuple

import click

from kp_scorer.characters import escaped
from kp_scorer.cli.gunzip import Gunzip, is_gzip
from kp_scorer.decoding import Limits, decode_json, decode_trace, parse_json
from kp_scorer.errors import InvalidTrace, Problem
from kp_scorer.trace import ReasoningTrace

_BEGINNINGS: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""What a file in another format begins with."""
_CSV: Final = re.compile(rb'"?[A-Za-z][\w .-]*"?([,;\t]"?[\w .-]*"?)+')
"""The names of columns."""
_AROUND_BYTES: Final = 4_096
"""How much may stand around a trace on its line: spaces, the end of the line."""
_MOST_BYTES: Final = 2**28
"""Of a document; and how far the end of a line is looked for."""


class Line(NamedTuple):
    """One trace of the input, or what is wrong with it. ``number`` counts lines, or a document's items, from 1."""

    number: int
    trace: ReasoningTrace | InvalidTrace
    size_bytes: int = 0
    """How long the line is; 0 in a document, which is held whole."""
    of: int | None = None
    """How many items the document has; None for lines, whose end is not known."""


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
    """Standard input, buffered once more: Python aborts if a thread still reads from its own one in the end."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        # Something that stands in its place within this process.
        return sys.stdin.buffer


def read_traces(stream: IO[bytes], limits: Limits) -> Iterator[Line]:
    """Decode traces one by one, as they come in; blank lines are skipped.

    Input whose first line begins a list, or an object that ends on a later line, is one document: a trace or several. It is
    held whole, so it may have 256 MiB; of lines only one is held, and of that no more than a trace may have. What begins as a
    gzip file is unpacked as it comes in; sizes are of what is in it.

    Raises:
        BadParameter: it is neither, but another format; a document is larger, or a line too long by as much; it cannot be read.
    """
    stream = unpacked(stream)
    number, raw = 1, _begin_line(stream, limits)
    _refuse_other_formats(raw)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    while raw.isspace():
        number, raw = number + 1, _begin_line(stream, limits)
    if _opens_document(raw.strip()):
        yield from _read_document(raw + _rest_of_document(stream, number), number, limits)
        return
    while raw:
        size_bytes = len(raw) + _skip_rest_of_line(stream, raw, number)
        if size_bytes > len(raw):
            yield Line(number, _too_long(size_bytes, limits), len(raw))
        elif line := raw.strip():
            yield _decoded(number, line, limits)
        number, raw = number + 1, _begin_line(stream, limits)


def unpacked(stream: IO[bytes]) -> io.BufferedReader:
    """The stream, or what is in it where it begins as a gzip file."""
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(io.BytesIO(stream.read()))
    return io.BufferedReader(Gunzip(buffered)) if is_gzip(_read(buffered.peek, 1)) else buffered


def _begin_line(stream: IO[bytes], limits: Limits) -> bytes:
    """The next line, or as much of it as a trace may have and something around it; empty at the end."""
    return _read(stream.readline, limits.message_bytes + _AROUND_BYTES)


def _skip_rest_of_line(stream: IO[bytes], begun: bytes, number: int) -> int:
    """Pass over what is left of a line; return how many bytes that is."""
    skipped, piece = 0, begun
    while piece and not piece.endswith(b"\n"):
        piece = _read(stream.readline, _AROUND_BYTES)
        skipped += len(piece)
        if skipped > _MOST_BYTES:
            raise click.BadParameter(f"line {number}: expected its end within {_MOST_BYTES} bytes", param_hint="FILE")
    return skipped


def _rest_of_document(stream: IO[bytes], number: int) -> bytes:
    rest = _read(stream.read, _MOST_BYTES + 1)
    if len(rest) > _MOST_BYTES:
        raise click.BadParameter(
            f"line {number} begins a document: expected one of at most {_MOST_BYTES} bytes; JSON Lines may be longer",
            param_hint="FILE",
        )
    return rest


def _read(read: Callable[[int], bytes], most_bytes: int) -> bytes:
    try:
        return read(most_bytes)
    except OSError as error:
        raise click.BadParameter(f"it cannot be read: {error.strerror}", param_hint="FILE") from None


def _refuse_other_formats(first_line: bytes) -> None:
    """Raise BadParameter for what would otherwise be an error for each of its lines."""
    found = next((name for beginning, name in _BEGINNINGS.items() if first_line.startswith(beginning)), "")
    if not found and _CSV.fullmatch(first_line.removeprefix(codecs.BOM_UTF8).rstrip()):
        found = "CSV"
    if found:
        raise click.BadParameter(
            f"expected JSON Lines or one JSON document, in UTF-8; this looks like {found}", param_hint="FILE"
        )


def _decoded(number: int, line: bytes, limits: Limits) -> Line:
    try:
        return Line(number, decode_json(line, limits), len(line))
    except InvalidTrace as error:
        return Line(number, error, len(line))


def _too_long(size_bytes: int, limits: Limits) -> InvalidTrace:
    return InvalidTrace([Problem("$", f"expected at most {limits.message_bytes} bytes, got {size_bytes}")])


def _opens_document(line: bytes) -> bool:
    """Whether JSON begins on this line and ends on a later one, or is a list."""
    if line.startswith(b"["):
        return True
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        return line.startswith(b"{") and error.pos >= len(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return False
    return False


def _read_document(raw: bytes, first: int, limits: Limits) -> Iterator[Line]:
    # The limits on bytes and values are for one trace; a list of traces may be longer. No text has more values than bytes.
    whole = limits.model_copy(update={"message_bytes": len(raw), "values": len(raw)})
    try:
        document = parse_json(raw, whole)
    except InvalidTrace as error:
        lines = raw.splitlines()
        if lines[0].startswith(b"{") and any(line.startswith(b"{") for line in lines[1:]):
            # JSON Lines after all, with a truncated first line.
            yield from (_decoded(number, line, limits) for number, line in enumerate(map(bytes.strip, lines), first) if line)
        else:
            yield Line(first, error)
        return
    items = document if isinstance(document, list) else [document]
    for number, item in enumerate(items, start=1):
        try:
            yield Line(number, decode_trace(item, limits), of=len(items))
        except InvalidTrace as error:
            yield Line(number, error, of=len(items))
