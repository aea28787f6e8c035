"""Standard streams that a command can rely on, though each of them may be closed, full, or a pipe that nobody reads."""

import errno
import io
import os
import sys
from typing import Any, Final, TextIO

from kp_scorer.errors import OutputFailed

# Opened so that what a closed stream cannot do fails as it would.
_IN_PLACE_OF_CLOSED: Final = (os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)


def guard_streams() -> None:
    """Have printing to stdout raise OutputFailed if it cannot be written, and what cannot be written to stderr just get lost.

    To be called before anything else is opened: the number of a closed stream goes to the next file or connection, and with it
    all that is printed, by child processes too.
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
            # What could not be written stays in the buffer: Python would try once more at the end, and fail in its own words.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise OutputFailed(f"stdout: {error.strerror}") from None
        return written


class _Stderr(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            # Nothing is written where that would block.
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def _text(raw: io.FileIO, stream: TextIO | None) -> TextIO:
    encoding, errors = (stream.encoding, stream.errors) if stream else ("utf-8", "backslashreplace")
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=True)
