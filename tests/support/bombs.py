"""Bodies of some hundred kilobytes or less that unpack to a quarter of a gigabyte."""

import bz2
import lzma
import zlib
from functools import cache
from typing import Final

GZIP: Final = "application/x-gzip"
"""What Celery calls the compression of zlib."""

_BYTES: Final = 2**28
_PIECES: Final = 64


@cache
def bombs() -> dict[str, bytes]:
    """One for each compression, by the name that Celery has for it; some kinds can be made of pieces."""
    piece = b"[" * (_BYTES // _PIECES)
    return {
        GZIP: zlib.compress(piece * _PIECES, 1),
        "application/x-bz2": bz2.compress(piece, 1) * _PIECES,
        "application/x-lzma": lzma.compress(piece, preset=0) * _PIECES,
    }
