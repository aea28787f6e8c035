"""Prints JSON Lines for programs on stdout, and notes for people on stderr.

Either may be a terminal, so control characters from a trace, a file or a server are escaped. Either may be closed, full, or a
pipe that nobody reads.
"""

import errno
import fcntl
import io
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, TextIO

import click

from kp_scorer.characters import escaped, escaped_lines
from kp_scorer.errors import InvalidTrace, OutputFailed, TraceConflict, TraceDead, UnknownFormat
from kp_scorer.files import open_regular

NO_EMBEDDER: Final = (  # A command that scores without an embedder prints this once.
    "there is no embedder, so every novelty is 0.5: install kp-scorer[embedding], or set embedding.embedder to words"
)
_MOST_NAMED: Final = 3
OWN_SHARE: Final = "for a share that you choose: `kp-scorer calibrate`, then --config with the thresholds that it writes"
# The modes of the null device in place of a closed stdin, stdout or stderr. Each is the opposite of the stream's, so that
# reading or writing fails as on a closed stream.
_IN_PLACE_OF_CLOSED: Final = (os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)


def print_note(text: str) -> None:
    """Print a note for people to stderr."""
    click.echo(escaped_lines(text), err=True)


def print_json(row: Mapping[str, Any]) -> None:
    """Print one JSON line and flush it, so that a reader of the pipe sees it at once; raise OutputFailed if that fails."""
    # Refuse NaN and Infinity, which Python would write although they are not JSON.
    print_text(json_line(row, allow_nan=False))


def json_line(row: Mapping[str, Any], *, allow_nan: bool) -> str:
    """Return an object as one line of JSON."""
    return escaped(json.dumps(row, ensure_ascii=False, allow_nan=allow_nan, separators=(",", ":"))) + "\n"


def print_row(row: dict[str, Any], text: str | None = None) -> None:
    """Print a row: to a pipe as a JSON line, to a terminal as ``text``, by default its fields; nothing for an empty text."""
    if not sys.stdout.isatty():
        print_json(row)
    elif text or text is None:
        print_text(escaped_lines(in_words(row) if text is None else text) + "\n")


def in_words(value: Any) -> str:
    """Return parsed JSON as names and values for people, without its brackets and quotes."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(each)}" for name, each in value.items()) or "none"
    if isinstance(value, list):
        return "; ".join(map(in_words, value)) or "none"
    return str("unknown" if value is None else value)


def duration(seconds: float) -> str:
    """Return a duration in seconds, minutes, hours or days, whichever takes few digits."""
    for unit, length_s in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def print_text(text: str) -> None:
    """Print a text and flush it; raise OutputFailed if nobody reads it or the disk is full."""
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def open_output(name: str, option: str = "--output", *, is_new: bool = False) -> Iterator[Callable[[str], object]]:
    """Open stdout for ``-``, or else a file as :func:`complete_file` does; yield a function that writes to it."""
    if name == "-":
        yield print_text
        return
    with complete_file(name, option, is_new=is_new) as partial, partial.open("w", encoding="utf-8") as file:
        yield file.write


@contextmanager
def complete_file(name: str, option: str = "--output", *, is_new: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file to write, which gets this name, and an earlier file's mode, once the body ends.

    After an error, such as a full disk, no file is half written: the earlier one is as it was. Refuses links, devices, a file
    that another command is writing, and with ``is_new`` every earlier file.
    """
    try:
        mode = None
        with suppress(FileNotFoundError), open_regular(name, "r+b", follow=False) as earlier:
            if is_new:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            mode = stat.S_IMODE(os.fstat(earlier.fileno()).st_mode)
        partial = Path(f"{name}.partial")
        # Do not truncate it yet: another command may be writing it.
        with open_regular(partial, "a", follow=False) as file:
            _lock(file, partial)
            try:
                file.truncate(0)
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                yield partial
                # A file that is a mount of its own cannot be replaced, so this copies the content into it.
                shutil.move(partial, name)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise click.BadParameter(escaped(f"{name}: {error.strerror}"), param_hint=option) from None
    print_note(f"wrote {name}")


def _lock(file: IO[str], path: Path) -> None:
    """Lock a file until it is closed; raise BlockingIOError if another command has locked it, or has moved it just now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        return  # This file system has no locks.
    raise BlockingIOError(errno.EWOULDBLOCK, "another command is writing it")


def refusal(line_number: int, error: InvalidTrace | TraceConflict | TraceDead, file: str = "") -> dict[str, Any]:
    """Print the error in a line of the input to stderr, an unknown format once for each file; return it as a row."""
    place = {name: value for name, value in (("file", file), ("line", line_number)) if value}
    where = f"line {line_number}" if line_number else ""
    if isinstance(error, UnknownFormat) and error.count > 1:
        more = error.count - len(error.lines)
        where = f"lines {', '.join(map(str, error.lines))}{f' and {more} more' if more else ''}"
    print_note(": ".join(filter(None, (file, where, str(error)))))
    if isinstance(error, TraceConflict):
        return {"trace_id": error.trace_id, "state": "conflict", **place}
    if isinstance(error, TraceDead):
        return {"trace_id": error.trace_id, "state": "dead", "reason": error.reason, "detail": error.detail, **place}
    return {**place, "state": "invalid", "problems": [problem._asdict() for problem in error.problems]}


def note_ids(trace_ids: Sequence[str], what_became: str) -> None:
    """Print how many traces or domains there are, ``what_became`` of them, and the first names; print nothing for none."""
    if trace_ids:
        more = f" and {len(trace_ids) - _MOST_NAMED} more" if len(trace_ids) > _MOST_NAMED else ""
        print_note(f"{len(trace_ids)} {what_became}: {', '.join(trace_ids[:_MOST_NAMED])}{more}")


def note_count(number: int, words: str) -> None:
    """Print a number and what it counts; print nothing for none."""
    if number:
        print_note(f"{number} {words}")


def note_damaged(damaged: Mapping[str, str]) -> int:
    """Print the damaged records that a command skips, each with its problem; return their number."""
    for trace_id, problem in damaged.items():
        print_note(f"{trace_id}: skipped: {problem}")
    return len(damaged)


def guard_streams() -> None:
    """Make printing to a broken stdout raise OutputFailed, and printing to a broken stderr do nothing.

    Call this before anything else is opened: the next file or connection would get the descriptor of a closed stream, and with
    it everything that this process and its children print.
    """
    for number, flags in enumerate(_IN_PLACE_OF_CLOSED):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - a descriptor, for as long as the process runs
    sys.stdout = _text(_Stdout(1, "wb", closefd=False), sys.stdout)
    sys.stderr = _text(_Stderr(2, "wb", closefd=False), sys.stderr)


class _Stdout(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            written: int | None = super().write(data)
            if written is None:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            # The text stays in the buffer, so at exit Python would try to write it again, and print a traceback.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise OutputFailed(f"stdout: {error.strerror}", is_unread=error.errno == errno.EPIPE) from None
        return written


class _Stderr(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            # On a pipe that is full and does not block, write() returns None: the text is lost.
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def _text(raw: io.FileIO, stream: TextIO | None) -> TextIO:
    # JSON is UTF-8 in every locale. A terminal may show other characters only, and gets escapes in place of the rest.
    encoding = stream.encoding if stream and raw.isatty() else "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=True)
