"""Dead letters: submissions that will never be decided, kept with their reason and their bytes."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any, Final, Literal, NamedTuple, get_args

import redis

from worker.keys import Keys
from worker.redis_client import unavailable_if_down

Reason = Literal["malformed", "invalid", "conflict", "scoring_failed"]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)

KEPT_S: Final = 30 * 86_400
"""How long a dead letter is kept."""

_READ_CHUNK: Final = 100
"""Dead letters read in one round trip; each may hold megabytes."""


class DeadLetter(NamedTuple):
    """A dead letter as it is kept."""

    letter_id: str
    """``<Redis time in ms>-<number>``."""
    reason: str
    detail: str
    """Field paths and figures, never content."""
    trace_id: str
    """Empty where the submission had none to speak of."""
    digest: str
    """BLAKE2b-128 of the payload, in hex."""
    payload: bytes
    """The submission as UTF-8 JSON; if it is malformed, the body of the message as it came."""


class DeadLetters:
    """The dead-letter queue: a Redis stream, oldest first, each entry kept for 30 days."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """Use the dead letters under the prefix of ``keys``."""
        self._client = client
        self._key = keys.dead_letters

    def put(self, payload: bytes, reason: Reason, detail: str, trace_id: str = "") -> None:
        """Keep a submission's bytes and why it is dead. ``detail`` holds field paths and figures, never content.

        Raises:
            ServiceUnavailable: Redis cannot be reached; the submission must be given back, not acknowledged.
        """
        fields: dict[Any, Any] = {
            "reason": reason,
            "detail": detail,
            "trace_id": trace_id,
            "digest": hashlib.blake2b(payload, digest_size=16).hexdigest(),
            "payload": payload,
        }
        oldest_ms = max(0, time.time_ns() // 1_000_000 - KEPT_S * 1_000)
        with unavailable_if_down("dead letters"):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.xadd(self._key, fields, minid=oldest_ms, approximate=True)
            pipeline.expire(self._key, KEPT_S)
            pipeline.execute()

    def read(self) -> Iterator[DeadLetter]:
        """Give all dead letters, oldest first.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        start = "-"
        while True:
            with unavailable_if_down("dead letters"):
                chunk: Any = self._client.xrange(self._key, start, "+", _READ_CHUNK)
            for letter_id, fields in chunk:
                yield _letter(letter_id, fields)
            if len(chunk) < _READ_CHUNK:
                return
            start = f"({chunk[-1][0].decode()}"

    def drop(self, letter_id: str) -> bool:
        """Remove a dead letter for good; return whether there was one.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            return bool(self._client.xdel(self._key, letter_id))


def _letter(letter_id: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    text = {name: fields[name.encode()].decode() for name in ("reason", "detail", "trace_id", "digest")}
    return DeadLetter(letter_id.decode(), payload=fields[b"payload"], **text)
