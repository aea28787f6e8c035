"""Opens the files and standard input that commands read, and unpacks them as they are read."""

import gzip
import io
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import IO, Any, Final

import click

from kp_scorer.characters import escaped

_LARGEST_WINDOW: Final = 25  # As a power of two: unpacking holds it in memory. `zstd` writes 8 MiB by default.

_zstd: Any = None
# The first is part of Python from 3.14 on; the second is the same for earlier versions.
for _name in ("compression.zstd", "backports.zstd"):
    with suppress(ModuleNotFoundError):
        _zstd = _zstd or import_module(_name)

_Damage: tuple[type[Exception], ...] = (gzip.BadGzipFile, zlib.error, *([_zstd.ZstdError] if _zstd else ()))


def open_input(name: str) -> io.BufferedReader:
    """Open a file, or standard input for ``-``.

    Standard input gets a buffer of its own: Python aborts if it ends while a thread reads through that of ``sys.stdin``.
    """
    try:
        return open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-")
    except OSError as error:
        raise click.BadParameter(escaped(f"{name}: {error.strerror}"), param_hint="FILE") from None


class _AvailableBytes:
    """A stream that passes on the bytes that have arrived.

    Unpacking asks for 8 KiB or more (up to CPython 3.14), and would wait for all of them.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def read(self, most_bytes: int) -> Any:
        # The magic number is read in one call, and must not be cut.
        return self._stream.read(most_bytes) if most_bytes <= 2 else self._stream.read1(most_bytes)


def unpacked(stream: io.BufferedReader) -> io.BufferedReader:
    """Return the stream, or what is in a gzip or Zstandard file, unpacked as it is read; raise BadParameter if that fails."""
    # No JSON begins with the first byte of either.
    beginning = read_bytes(stream.peek, 4)
    # A file of pzstd begins with a skippable frame.
    is_zstandard = beginning.startswith(b"(") or beginning[1:4] == b"*M\x18"
    if is_zstandard and _zstd is None:
        reason = "a Zstandard file, which Python reads from 3.14 on: `pip install backports.zstd`, or unpack it"
        raise click.BadParameter(f"it cannot be read: {reason}", param_hint="FILE")
    if is_zstandard:
        options = {_zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW}
        stream = _zstd.ZstdFile(_AvailableBytes(stream), options=options)
    elif beginning.startswith(b"\x1f"):
        stream = gzip.GzipFile(mode="rb", fileobj=_AvailableBytes(stream))  # type: ignore[call-overload]  # it seeks only if asked to
    return stream


def read_bytes(read: Callable[[int], bytes], most_bytes: int) -> bytes:
    """Read at most ``most_bytes`` by a method of an input's stream; raise BadParameter if that fails."""
    try:
        return read(most_bytes)
    except EOFError:
        reason: str | None = "a compressed file that is cut off"
    except _Damage:
        reason = "a compressed file that is damaged"
    except OSError as error:
        reason = error.strerror
    raise click.BadParameter(f"it cannot be read: {reason}", param_hint="FILE")


def lines_in(stream: IO[bytes], most_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers; a longer line is yielded in pieces of ``most_bytes``."""
    for number, line in enumerate(iter(lambda: read_bytes(stream.readline, most_bytes), b""), 1):
        if not line.isspace():
            yield number, line


def texts_in(stream: IO[bytes], most_bytes: int, option: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, as :func:`lines_in` does, as texts.

    Raises BadParameter, which names the ``option``, for a line that is not UTF-8. A line in UTF-16 has zero bytes.
    """
    for number, line in lines_in(stream, most_bytes):
        is_cut = len(line) == most_bytes and not line.endswith(b"\n")
        with suppress(UnicodeDecodeError):
            text = line.decode("utf-8-sig", "replace" if is_cut else "strict").strip()
            if "\0" not in text:
                yield from [(number, text)] if text else []
                continue
        raise click.BadParameter(f"line {number}: expected text in UTF-8", param_hint=option)
