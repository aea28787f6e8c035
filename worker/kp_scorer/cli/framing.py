"""Divides an input into lines or documents, each in bounded memory."""

import codecs
import io
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Final, cast

import click

from kp_scorer.cli.unpacking import read_bytes
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import check_values

_OTHER_FORMAT: Final = re.compile(rb'.{,16}[\0-\x08\x0e-\x1f].*|"?[A-Za-z][\w .-]*+"?+(?:[,;\t]"?+[\w .-]*+"?+)++', re.DOTALL)
"""Matches a first line that is not JSON: binary data, as in other compressed files or UTF-16, or the header of a table."""
_AROUND_BYTES: Final = 4_096  # The room for white space around a trace on its line, and for the end of the line.
_SPREAD: Final = 8  # A trace in an indented document may be this many times as long as on one line.
MOST_BYTES: Final = 2**28
"""The size of the longest line that is skipped, and the limit for a list of traces or for JSON that is not traces."""
MOST_VALUES: Final = 2**22  # The limit on the values of such a list or JSON: each may take a hundred bytes of memory.
_FIELD_OF_OTHERS: Final = re.compile(
    rb"\b(resourceSpans|trace_?[iI]d|observations|messages?|contents?|parts|role|input|output|request|response|trajectory|steps|"
    rb"payload|data|type|action|observation|events?|history|conversations?|conversation_id|requests|turns|mapping|query|intent)\b"
)
FIELD_OF_TRACES: Final = re.compile(rb"""(?<!\\)"@(type|context)"\s*:""")
_QUOTED: Final = re.compile(rb'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)  # A string that is cut off extends to the end.
_DECODER: Final = json.JSONDecoder()
_SPACE: Final = re.compile(r"[\s\ufeff]*")  # With the byte order mark of a file that was joined to another.
_CUT: Final = b"\0"  # Marks the end of a part of a line: it is in a string if that is open there.


def framed(stream: io.BufferedReader, message_bytes: int) -> tuple[int, int, Iterator[tuple[int, bytes, int]]]:
    """Return the number of the first line, the most bytes that a line or document may have, and the lines or documents.

    The input consists of documents if the first one ends on a later line than it begins. Each item is a line number, the bytes,
    and their size. An item that is too large is cut off, so it has fewer bytes than its size says.
    """
    number, line = _first_line(stream, message_bytes)
    if line.startswith(b"[") or _may_be_large(line):
        line = _entire(stream, line)
    if _is_document(stream, line):
        most_bytes = _SPREAD * message_bytes
        return number, most_bytes, _documents(stream, number, line, most_bytes)
    return number, message_bytes, _lines(stream, number, line, message_bytes)


def _first_line(stream: IO[bytes], most_bytes: int) -> tuple[int, bytes]:
    """Return the number of the first line that is not blank, and the line, cut off as by ``_lines``; refuse other formats."""
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
    """Return whether JSON begins on this line and ends on a later one. False if the line is cut off and others follow."""
    try:
        check_values(line, MOST_VALUES)
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
    """Yield this line and each later one that is not blank: its number, about its first ``most_bytes``, and its size."""
    while line:
        if not line.endswith(b"\n") and _may_be_large(line):
            line = _entire(stream, line)
        size_bytes, piece = len(line), line
        while piece and not piece.endswith(b"\n"):
            piece = read_bytes(stream.readline, _AROUND_BYTES)
            size_bytes += len(piece)
            if size_bytes > MOST_BYTES + len(line):
                raise click.BadParameter(f"line {number}: expected its end within {MOST_BYTES} bytes", param_hint="FILE")
        if size_bytes > len(line) or not line.isspace():
            yield number, line, size_bytes
        number, line = number + 1, read_bytes(stream.readline, most_bytes + _AROUND_BYTES)


def _documents(stream: IO[bytes], number: int, line: bytes, most_bytes: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield for each document from this line on the number of its first line, its bytes and their size.

    A document ends on the line where its brackets close. Counting brackets outside of strings takes linear time, reads nothing
    beyond the document, and finds the next document after one that is not JSON; a parser would have to start anew at each line.
    """
    while line:
        first, pieces, size_bytes, depth, opened = number, list[bytes](), 0, 0, b""
        is_large = line.startswith(b"[")
        while line:
            if not is_large and size_bytes <= most_bytes < size_bytes + len(line):
                is_large = _may_be_large(b"".join([*pieces, line]))
            line = _entire(stream, line) if is_large else line
            size_bytes += len(line)
            if size_bytes > MOST_BYTES:
                yield first, b"", size_bytes
                return
            # Hold nothing of a document that is too large, but find its end.
            pieces.append(line)
            if size_bytes > most_bytes and not is_large:
                pieces.clear()
            # A part of a line may end within a string, and even within an escape there.
            is_part, text = not line.endswith(b"\n"), opened + line
            outside = _QUOTED.sub(b"", text + _CUT * is_part)
            is_open = is_part and not outside.endswith(_CUT)
            opened = b'"' + b"\\" * ((len(text) - len(text.rstrip(b"\\"))) % 2) if is_open else b""
            depth += outside.count(b"{") + outside.count(b"[") - outside.count(b"}") - outside.count(b"]")
            number += not is_part
            if depth <= 0:
                break
            line = read_bytes(stream.readline, most_bytes + 1)
        if not (document := b"".join(pieces)).isspace():
            yield first, document, size_bytes
        line = read_bytes(stream.readline, most_bytes + 1)


def divided(raw: bytes) -> list[bytes]:
    """Return the objects and lists in a text that consists of several; nothing for any other text.

    Files that were joined make such texts if they do not end in a line break, and so do services that write none.
    """
    documents, place = list[bytes](), 0
    with suppress(ValueError, RecursionError):
        text = raw.decode()
        while place < len(text) and text[place] in "{[":
            end = _DECODER.raw_decode(text, place)[1]
            documents.append(text[place:end].encode())
            place = cast("re.Match[str]", _SPACE.match(text, end)).end()
        return documents if place == len(text) else []
    return []


def _may_be_large(beginning: bytes) -> bool:
    """Return whether this may be the beginning of a log of another tool, which may be larger than a trace."""
    return FIELD_OF_TRACES.search(beginning) is None and _FIELD_OF_OTHERS.search(beginning) is not None


def _entire(stream: IO[bytes], line: bytes) -> bytes:
    """Read the rest of a line, up to a limit, and return all of it."""
    return line if line.endswith(b"\n") else line + read_bytes(stream.readline, max(0, MOST_BYTES + 1 - len(line)))
