"""A gzip file, unpacked as it comes in: the standard library's reader waits for more of it than it needs."""

import errno
import io
import zlib
from typing import Any, Final

_MAGIC: Final = b"\x1f\x8b"
_READ_BYTES: Final = 65_536
_GZIP: Final = 16 + zlib.MAX_WBITS


def is_gzip(beginning: bytes) -> bool:
    """Whether a file that begins so, be it by one byte alone, is a gzip file."""
    return bool(beginning) and beginning[:2] == _MAGIC[: len(beginning)]


class Gunzip(io.RawIOBase):
    """What is in a gzip file of one member or several. No more of it is in memory than is asked for."""

    def __init__(self, packed: io.BufferedReader) -> None:
        """Unpack what is read from a stream."""
        self._packed = packed
        self._inflate = zlib.decompressobj(_GZIP)
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as far as what has come in goes; 0 at the end.

        Raises:
            OSError: it is no gzip file, or damaged, or has no end.
        """
        while not self._is_at_end():
            some = self._rest or self._packed.read1(_READ_BYTES)
            try:
                unpacked = self._inflate.decompress(some, len(buffer))
            except zlib.error:
                raise OSError(errno.EIO, "a gzip file that is damaged") from None
            self._rest = self._inflate.unconsumed_tail
            if unpacked:
                buffer[: len(unpacked)] = unpacked
                return len(unpacked)
            if not some:
                raise OSError(errno.EIO, "a gzip file that is cut off")
        return 0

    def _is_at_end(self) -> bool:
        """Whether all members have been read; begins with the next if there is one."""
        if not self._inflate.eof:
            return False
        # A file may be filled up with zeros.
        following = self._inflate.unused_data.lstrip(b"\0")
        while not following and (some := self._packed.read1(_READ_BYTES)):
            following = some.lstrip(b"\0")
        if following:
            self._inflate, self._rest = zlib.decompressobj(_GZIP), following
        return not following
