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
    for text in _texts(stream, limits.message_bytes):
        if text.is_document:
            yield from _read_document(text.content, text.number, limits)
        elif text.size_bytes > len(text.content):
            yield Line(text.number, _too_long(text.size_bytes, limits.message_bytes), len(text.content))
        else:
            yield _decoded(text.number, text.content.strip(), limits)


def read_json(stream: IO[bytes], limits: Limits) -> Iterator[tuple[int, object | InvalidTrace]]:
    """Parse JSON of any kind: each with the line on which it begins, and what is wrong in the place of what is no JSON.

    Lines and documents are told apart as by :func:`read_traces`, but that several lines may be a list each. Any may have
    256 MiB; of the limits none counts but the depth.

    Raises:
        BadParameter: as by :func:`read_traces`.
    """
    for text in _texts(stream, _MOST_BYTES):
        if text.size_bytes > len(text.content):
            yield text.number, _too_long(text.size_bytes, _MOST_BYTES)
            continue
        found = _parsed(text.content, limits)
        lines = []
        if isinstance(found, InvalidTrace) and text.is_document:
            is_list = isinstance(_parsed(text.content.partition(b"\n")[0], limits), list)
            lines = _numbered(text.content, text.number) if is_list else _lines_after_all(text.content, text.number)
        yield from ((number, _parsed(line, limits)) for number, line in lines) if lines else [(text.number, found)]


class _Text(NamedTuple):
    """A line of the input that is not blank, or the whole of a document."""

    number: int
    content: bytes
    size_bytes: int
    """How long the line is, which may be more than is held of it."""
    is_document: bool


def _texts(stream: IO[bytes], most_bytes: int) -> Iterator[_Text]:
    """Lines, of which so many bytes are held and something around them, or one document."""
    stream = unpacked(stream)
    number, raw = 1, _begin_line(stream, most_bytes)
    _refuse_other_formats(raw)
    raw = raw.removeprefix(codecs.BOM_UTF8)
    while raw.isspace():
        number, raw = number + 1, _begin_line(stream, most_bytes)
    if _opens_document(raw.strip()):
        whole = raw + _rest_of_document(stream, number)
        yield _Text(number, whole, len(whole), is_document=True)
        return
    while raw:
        size_bytes = len(raw) + _skip_rest_of_line(stream, raw, number)
        if size_bytes > len(raw) or not raw.isspace():
            yield _Text(number, raw, size_bytes, is_document=False)
        number, raw = number + 1, _begin_line(stream, most_bytes)


def unpacked(stream: IO[bytes]) -> io.BufferedReader:
    """The stream, or what is in it where it begins as a gzip file."""
    buffered = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(io.BytesIO(stream.read()))
    return io.BufferedReader(Gunzip(buffered)) if is_gzip(read_bytes(buffered.peek, 1)) else buffered


def _begin_line(stream: IO[bytes], most_bytes: int) -> bytes:
    """The next line, or so many bytes of it and something around them; empty at the end."""
    return read_bytes(stream.readline, most_bytes + _AROUND_BYTES)


def _skip_rest_of_line(stream: IO[bytes], begun: bytes, number: int) -> int:
    """Pass over what is left of a line; return how many bytes that is."""
    skipped, piece = 0, begun
    while piece and not piece.endswith(b"\n"):
        piece = read_bytes(stream.readline, _AROUND_BYTES)
        skipped += len(piece)
        if skipped > _MOST_BYTES:
            raise click.BadParameter(f"line {number}: expected its end within {_MOST_BYTES} bytes", param_hint="FILE")
    return skipped


def _rest_of_document(stream: IO[bytes], number: int) -> bytes:
    rest = read_bytes(stream.read, _MOST_BYTES + 1)
    if len(rest) > _MOST_BYTES:
        raise click.BadParameter(
            f"line {number} begins a document: expected one of at most {_MOST_BYTES} bytes; JSON Lines may be longer",
            param_hint="FILE",
        )
    return rest


def read_bytes(read: Callable[[int], bytes], most_bytes: int) -> bytes:
    """What a method of an input's stream reads.

    Raises:
        BadParameter: it cannot be read.
    """
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


def _too_long(size_bytes: int, most_bytes: int) -> InvalidTrace:
    return InvalidTrace([Problem("$", f"expected at most {most_bytes} bytes, got {size_bytes}")])


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


def _parsed(raw: bytes, limits: Limits) -> object | InvalidTrace:
    # The limits on bytes and values are for one trace; several may be longer. No text has more values than bytes.
    whole = limits.model_copy(update={"message_bytes": len(raw), "values": len(raw)})
    try:
        return parse_json(raw, whole)
    except InvalidTrace as error:
        return error


def _lines_after_all(raw: bytes, first: int) -> list[tuple[int, bytes]]:
    """The lines of what looks like a document, with their numbers, if it is JSON Lines with a truncated first line."""
    lines = raw.splitlines()
    if not (lines[0].startswith(b"{") and any(line.startswith(b"{") for line in lines[1:])):
        return []
    return _numbered(raw, first)


def _numbered(raw: bytes, first: int) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(map(bytes.strip, raw.splitlines()), first) if line]


def _read_document(raw: bytes, first: int, limits: Limits) -> Iterator[Line]:
    document = _parsed(raw, limits)
    if isinstance(document, InvalidTrace):
        lines = _lines_after_all(raw, first)
        yield from (_decoded(number, line, limits) for number, line in lines) if lines else [Line(first, document)]
        return
    items = document if isinstance(document, list) else [document]
    for number, item in enumerate(items, start=1):
        try:
            yield Line(number, decode_trace(item, limits), of=len(items))
        except InvalidTrace as error:
            yield Line(number, error, of=len(items))
