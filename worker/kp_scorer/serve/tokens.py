"""Reads the file of tokens, once at the start of the server, and admits requests that bring one of them."""

import hmac
import re
from collections.abc import Collection
from hashlib import sha256
from typing import Final

from kp_scorer.errors import SettingsError
from kp_scorer.files import check_writer, read_text

_MOST_FILE_BYTES: Final = 65_536
_TOKEN: Final = re.compile(r"([!-~]{16,512})(?:\s+(\S+))?")


def read_tokens(file: str) -> dict[str, str]:
    """Read a file that has on each line a token, and perhaps a queue behind it; lines that begin with # are comments.

    Return the queue of each token, empty for the first queue. Without a file there are no tokens.

    Raises SettingsError if it cannot be read, others may write to it, it has no token, or a line is not a token.
    """
    try:
        if file:
            check_writer(file)
        lines = read_text(file, _MOST_FILE_BYTES).splitlines() if file else []
    except OSError as error:
        raise SettingsError(f"serve.tokens: {file}: {error.strerror}") from None
    rows = [_TOKEN.fullmatch(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
    tokens = {row[1]: row[2] or "" for row in rows if row}
    if file and not (rows and all(rows)):
        message = "expected a token of 16 to 512 ASCII characters on each line, and perhaps a queue behind it"
        raise SettingsError(f"serve.tokens: {file}: {message}")
    return tokens


def admits(tokens: Collection[str], token: str) -> bool:
    """Return whether a request with this token, or an empty one, is admitted; without ``tokens`` every request is."""
    # All digests have the same length, and all are compared, so the time that this takes reveals nothing.
    own = sha256(token.encode("utf-8", "surrogatepass")).digest()
    matches = [hmac.compare_digest(own, sha256(each.encode()).digest()) for each in tokens]
    return any(matches) or not matches
