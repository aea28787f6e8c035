"""The tokens that requests bring, from a file that nobody but its owner may write to."""

import hmac
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from kp_scorer.errors import SettingsError
from kp_scorer.files import check_writer, read_text

_MOST_BYTES: Final = 65_536
_TOKEN: Final = re.compile(r"[!-~]{16,512}")


def read_tokens(file: str) -> list[str]:
    """Read a file with a token on each line; lines that begin with # are comments. No file, no tokens.

    Raises SettingsError: it cannot be read, others may write to it, it has no token, or one that is none.
    """
    try:
        if file:
            check_writer(file)
        lines = read_text(file, _MOST_BYTES).splitlines() if file else []
    except OSError as error:
        raise SettingsError(f"serve.tokens: {file}: {error.strerror}") from None
    tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if file and not (tokens and all(map(_TOKEN.fullmatch, tokens))):
        raise SettingsError(f"serve.tokens: {file}: expected a token of 16 to 512 ASCII characters on each line")
    return tokens


def admits(tokens: Sequence[str], token: str) -> bool:
    """Whether a request with this token, or with an empty one, is admitted; each is where there are none."""
    # Digests are of one length, and all are compared, so that how long it takes tells nothing.
    matches = [hmac.compare_digest(_digest(token), _digest(each)) for each in tokens]
    return any(matches) or not matches


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
