"""Reads traces from files, folders and standard input: JSON Lines or JSON documents.

Logs of other tools are converted on the way, if the command does that, and a thread may read ahead.
"""

import codecs
import io
import os
import stat
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Final, cast

import click

from kp_scorer.adapters import format_of
from kp_scorer.characters import escaped
from kp_scorer.cli.converting import MOST_PLACES, UNKNOWN, Conversion, Line
from kp_scorer.cli.framing import FIELD_OF_TRACES, MOST_BYTES, MOST_VALUES, divided, framed
from kp_scorer.cli.output import print_note
from kp_scorer.cli.unpacking import open_input, unpacked
from kp_scorer.decoding import check_trace, decode_trace, parse_json, parsed_or_refused
from kp_scorer.errors import InvalidTrace, Problem, UnknownFormat
from kp_scorer.limits import Limits

_SUFFIXES: Final = (".json", ".jsonl", ".ndjson", ".jl", ".traj")
_MOST_SUFFIXES: Final = 5
_CONVERT: Final = "a log of another tool: `kp-scorer convert` makes traces of it"
_AHEAD_BYTES: Final = 4_194_304  # The most bytes to read ahead: a batch of traces of a few kilobytes, or a few large ones.
_MORE: Final = "Extra data"  # Python's error for JSON with anything behind it.
_OF_DOCUMENTS: Final = {"message_bytes": MOST_BYTES, "values": MOST_VALUES}


def read_files(names: Sequence[str], limits: Limits, conversion: Conversion | None = None) -> Iterator[Line]:
    """Yield the lines of files, one file after another. A folder stands for all its JSON files, ``-`` for standard input.

    If one of several files cannot be read, the error is yielded as a line. Raises the errors of :func:`read_traces`.
    """
    files = [file for name in names for file in _files_in(name)]
    for name in files:
        place = name if len(files) > 1 or name not in names else ""
        try:
            with open_input(name) as stream:
                if _is_output(os.fstat(stream.fileno())):
                    raise click.BadParameter("it is not read, as the output of this command goes to it", param_hint="FILE")
                if conversion:
                    conversion.begin_file(place, _written_at(stream))
                for line in _reported_together(read_traces(stream, limits, conversion)):
                    yield line if line.file else line._replace(file=place)
        except click.BadParameter as error:
            if not place:
                if conversion:
                    # What was read before the damage may still wait to be continued.
                    yield from conversion.end_file()
                    yield from conversion.end()
                raise
            yield Line(0, InvalidTrace.whole(error.message), file=place)
        if conversion:
            yield from conversion.end_file()
    if conversion:
        yield from conversion.end()


def _reported_together(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield lines; report consecutive lines in unknown formats together, in the first of them."""
    for is_unknown, group in groupby(lines, key=lambda line: isinstance(line.trace, UnknownFormat)):
        if not is_unknown:
            yield from group
            continue
        first = next(group)
        numbers, count = [first.number], 1
        for count, line in enumerate(group, 2):
            numbers += [line.number] if count <= MOST_PLACES else []
        yield first._replace(trace=UnknownFormat(cast("UnknownFormat", first.trace).problems, numbers, count))


def _is_output(status: os.stat_result) -> bool:
    """Return whether stdout is redirected to this file, which would grow as it is read, without end."""
    return stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.fstat(1))


def _written_at(stream: io.BufferedReader) -> str | None:
    """Return the time when a file was written, as ISO 8601; None for a pipe or a terminal."""
    status = os.fstat(stream.fileno())
    # Some file systems hold times beyond the year 9999.
    with suppress(ValueError, OverflowError):
        return datetime.fromtimestamp(int(status.st_mtime), UTC).isoformat() if stat.S_ISREG(status.st_mode) else None
    return None


def _files_in(name: str) -> list[str]:
    """Return the file of this name, or the JSON files in the folder of this name and its subfolders, sorted.

    Folders that cannot be listed, and links that lead nowhere, are among them, as reading them gives the error.
    """
    if name == "-" or not Path(name).is_dir():
        return [name]
    unlisted = set[Path]()
    places = os.walk(name, onerror=lambda error: unlisted.add(Path(error.filename)))
    paths = sorted(Path(folder, each) for folder, folders, files in places for each in (*folders, *files))
    kinds = {path: kind for path in paths if path not in unlisted and (kind := _kind_of(path))}
    readable = sorted([*unlisted, *(path for path, kind in kinds.items() if kind in _SUFFIXES)])
    if others := Counter(kind for kind in kinds.values() if kind not in _SUFFIXES):
        names = ", ".join(f"{count} {escaped(suffix)}" for suffix, count in others.most_common(_MOST_SUFFIXES))
        more = " and others" if len(others) > _MOST_SUFFIXES else ""
        print_note(f"{name}: not read: {names}{more}; only {', '.join(_SUFFIXES)} are, also with .gz or .zst")
    return list(map(str, readable))


def _kind_of(path: Path) -> str:
    """Return the suffix of a file's name in lower case, without that of its compression; empty for a folder."""
    # A path that cannot be inspected cannot be read either, and reading it gives the error.
    with suppress(OSError):
        if path.is_dir():
            return "link to a folder" if path.is_symlink() else ""
        if path.exists() and not path.is_file():
            return "pipe or device"
        if _is_output(path.stat()):
            return "output of this command"
    return Path(path.name.lower().removesuffix(".gz").removesuffix(".zst")).suffix or "no suffix"


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
    first, most_bytes, pieces = framed(stream, limits.message_bytes)
    for number, raw, size_bytes in pieces:
        if size_bytes > len(raw):
            problem = Problem("$", f"expected at most {most_bytes} bytes, got {size_bytes}")
            yield Line(number, InvalidTrace([problem]), len(raw))
            continue
        # A file that was joined from several may have byte order marks within it.
        left = [raw.strip().removeprefix(codecs.BOM_UTF8).lstrip()]
        while left:
            raw = left.pop()
            own = _decoded(number, raw, limits, most_bytes) if FIELD_OF_TRACES.search(raw) else None
            if own and not isinstance(own.trace, InvalidTrace):
                yield own
                continue
            value = parsed_or_refused(raw, limits.model_copy(update=_OF_DOCUMENTS))
            if isinstance(value, InvalidTrace) and _MORE in str(value) and (documents := divided(raw)):
                left += reversed(documents)
            elif isinstance(value, InvalidTrace) and not own and not raw.startswith((b"{", b"[")):
                yield Line(number, UnknownFormat(value.problems, [number]), len(raw))
            elif isinstance(value, InvalidTrace) or (own and _is_trace(value)):
                yield own or Line(number, cast("InvalidTrace", value), len(raw))
            elif number == first and isinstance(value, list) and (not value or any(map(_is_trace, value))):
                for item, each in enumerate(value, start=1):
                    yield from _read(item, each, limits, conversion)
            else:
                yield from _read(number, value, limits, conversion)


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
            BadParameter: as by :func:`read_traces`, or the input cannot be opened. The lines before the error come first.
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
                # A file never blocks. Full batches are scored faster, and give the same figures in every run.
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
