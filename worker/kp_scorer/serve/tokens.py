"""The tokens that requests bring, from a file that nobody but its owner may write to."""

import hmac
import re
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

from kp_scorer.errors import SettingsError
from kp_scorer.files import is_writable_by_others, read_text

_MOST_BYTES: Final = 65_536
_TOKEN: Final = re.compile(r"[!-~]{16,512}")


class Tokens:
    """Which tokens are admitted; without any, every request is."""

    def __init__(self, tokens: list[str]) -> None:
        # Digests are of one length, so that how long a comparison takes tells nothing.
        self._digests = [_digest(token) for token in tokens]

    @classmethod
    def read(cls, file: str) -> Self:
        """Read a file with a token on each line; lines that begin with # are comments. No file, no tokens.

        Raises:
            SettingsError: it cannot be read, others may write to it, it has no token, or one that is none.
        """
        if not file:
            return cls([])
        try:
            if is_writable_by_others(Path(file).stat()):
                raise SettingsError(f"serve.tokens: {file}: others can write to it: chmod go-w")
            lines = read_text(file, _MOST_BYTES).splitlines()
        except OSError as error:
            raise SettingsError(f"serve.tokens: {file}: {error.strerror}") from None
        tokens = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens or not all(map(_TOKEN.fullmatch, tokens)):
            raise SettingsError(f"serve.tokens: {file}: expected a token of 16 to 512 ASCII characters on each line")
        return cls(tokens)

    def admit(self, token: str) -> bool:
        """Whether a request with this token, or with none, is admitted."""
        digest = _digest(token)
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return any(matches) or not matches


def _digest(token: str) -> bytes:
    return sha256(token.encode("utf-8", "surrogatepass")).digest()
