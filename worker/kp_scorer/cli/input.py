"""Traces from a file or standard input: JSON Lines, or one JSON document."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import IO, Final, NamedTuple

import click

from kp_scorer.characters import escaped
from kp_scorer.decoding import Limits, decode_json, decode_trace, parse_json
from kp_scorer.errors import InvalidTrace
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


class Line(NamedTuple):
    """One trace of the input, or what is wrong with it. ``number`` counts lines, or a document's items, from 1."""

    number: int
    trace: ReasoningTrace | InvalidTrace


@contextmanager
def open_input(name: str) -> Iterator[IO[bytes]]:
    """Open a file for reading, or standard input for ``-``."""
    try:
        opened = click.open_file(name, "rb")
    except OSError as error:
        raise click.BadParameter(escaped(f"{name}: {error.strerror}"), param_hint="FILE") from None
    with opened as stream:
        yield stream


def read_traces(stream: IO[bytes], limits: Limits) -> Iterator[Line]:
    """Decode traces one by one, as they come in; blank lines are skipped.

    Input whose first line begins a list, or an object that ends on a later line, is one document: a trace or several.

    Raises:
        BadParameter: it is neither, but another format.
    """
    first = stream.readline()
    _refuse_other_formats(first)
    numbered = enumerate(chain([first.removeprefix(codecs.BOM_UTF8)], stream), start=1)
    for number, raw in numbered:
        if not raw.strip():
            continue
        if _opens_document(raw.strip()):
            yield from _read_document(raw + stream.read(), number, limits)
            return
        yield from _read_lines([(number, raw)], limits)
        break
    yield from _read_lines(numbered, limits)


def _refuse_other_formats(first_line: bytes) -> None:
    """Raise BadParameter for what would otherwise be an error for each of its lines."""
    found = next((name for beginning, name in _BEGINNINGS.items() if first_line.startswith(beginning)), "")
    if not found and _CSV.fullmatch(first_line.removeprefix(codecs.BOM_UTF8).rstrip()):
        found = "CSV"
    if found:
        raise click.BadParameter(
            f"expected JSON Lines or one JSON document, in UTF-8; this looks like {found}", param_hint="FILE"
        )


def _read_lines(numbered: Iterable[tuple[int, bytes]], limits: Limits) -> Iterator[Line]:
    for number, raw in numbered:
        if line := raw.strip():
            try:
                yield Line(number, decode_json(line, limits))
            except InvalidTrace as error:
                yield Line(number, error)


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
            yield from _read_lines(enumerate(lines, start=first), limits)
        else:
            yield Line(first, error)
        return
    for number, item in enumerate(document if isinstance(document, list) else [document], start=1):
        try:
            yield Line(number, decode_trace(item, limits))
        except InvalidTrace as error:
            yield Line(number, error)
