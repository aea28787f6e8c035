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
            self._client.xadd(self._key, fields, minid=oldest_ms, approximate=True)


def _bytes(payload: object) -> bytes:
    return json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass")
