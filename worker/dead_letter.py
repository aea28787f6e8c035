"""Dead letters: submissions that will never be decided, kept with their reason and their bytes."""

import hashlib
import json
import time
from typing import Any, Final, Literal

import redis

from worker.keys import Keys
from worker.redis_client import unavailable_if_down

Reason = Literal["invalid", "conflict", "scoring_failed"]

KEPT_S: Final = 30 * 86_400
"""How long a dead letter is kept."""


class DeadLetters:
    """The dead-letter queue: a Redis stream, oldest first, each entry kept for 30 days."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """Use the dead letters under the prefix of ``keys``."""
        self._client = client
        self._key = keys.dead_letters

    def put(self, payload: object, reason: Reason, detail: str, trace_id: str = "") -> None:
        """Keep a submission's bytes and why it is dead. ``detail`` holds field paths and figures, never content.

        Raises:
            ServiceUnavailable: Redis cannot be reached; the submission must be given back, not acknowledged.
        """
        raw = _bytes(payload)
        fields: dict[Any, Any] = {
            "reason": reason,
            "detail": detail,
            "trace_id": trace_id,
            "digest": hashlib.blake2b(raw, digest_size=16).hexdigest(),
            "payload": raw,
        }
        oldest_ms = max(0, time.time_ns() // 1_000_000 - KEPT_S * 1_000)
        with unavailable_if_down("dead letters"):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.xadd(self._key, fields, minid=oldest_ms, approximate=True)
            pipeline.expire(self._key, KEPT_S)
            pipeline.execute()

    def erase(self, trace_id: str) -> int:
        """Remove the dead letters of a trace; return how many there were.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            entries: Any = self._client.xrange(self._key)
            found = [entry_id for entry_id, fields in entries if fields[b"trace_id"].decode() == trace_id]
            return int(self._client.xdel(self._key, *found)) if found else 0


def _bytes(payload: object) -> bytes:
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")
