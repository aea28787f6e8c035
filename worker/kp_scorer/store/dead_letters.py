"""The dead letters in Redis: one hash each, and an index by the time each was last heard of."""

import hashlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import redis
import structlog

from kp_scorer.errors import Reason
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import KEPT_S, Keys
from kp_scorer.store.scripts import lua_source

_READ_CHUNK: Final = 500

log = structlog.get_logger("kp_scorer.store.dead_letters")


class DeadLetter(NamedTuple):
    """A dead letter, all but its payload."""

    letter_id: str
    """BLAKE2b-128 of the payload, in hex: the same bytes are the same dead letter."""
    reason: str
    detail: str
    """Field paths and figures, never content."""
    trace_id: str
    """Empty where the submission had none to speak of."""
    attempts: int
    """How often it was delivered until it was given up."""
    first_ms: int
    """When it was first buried, in Unix time by Redis' clock."""
    last_ms: int
    """When it was last buried: redelivered, or submitted and failed again."""
    size_bytes: int
    """Size of its payload."""


class DeadLetters:
    """The dead-letter queue, each letter kept for 30 days after it was last heard of."""

    def __init__(self, client: redis.Redis, keys: Keys, record_ttl_ms: int) -> None:
        """Use the dead letters under the prefix of ``keys``; ``record_ttl_ms`` is how long the ledger keeps a record."""
        self._client = client
        self._keys = keys
        self._record_ttl_ms = record_ttl_ms
        self._bury = client.register_script(lua_source(__package__, "bury"))

    def bury(self, payload: bytes, reason: Reason, detail: str, trace_id: str = "", attempts: int = 1) -> None:
        """Keep a submission's bytes and why it is dead, log it, and mark its trace as dead unless that is decided.

        Args:
            payload: the submission as UTF-8 JSON; if it is malformed, the body of the message as it came.
            reason: the class of what is wrong.
            detail: what exactly: field paths and figures, never content.
            trace_id: the trace that dies with it. A conflict names one too, and does that one no harm.
            attempts: how often the submission was delivered.

        Raises:
            ServiceUnavailable: Redis cannot be reached; the submission must be given back, not acknowledged.
        """
        letter_id = hashlib.blake2b(payload, digest_size=16).hexdigest()
        keys = [self._keys.dead_letters, self._keys.letter(letter_id), self._keys.pending, self._keys.counts]
        if trace_id and reason != "conflict":
            keys.append(self._keys.record(trace_id))
        arguments: list[str | bytes | int] = [
            letter_id,
            reason,
            detail,
            trace_id,
            attempts,
            payload,
            KEPT_S * 1_000,
            self._record_ttl_ms,
        ]
        with unavailable_if_down("dead letters"):
            self._bury(keys=keys, args=arguments)
        log.warning("trace_dead", trace_id=trace_id, reason=reason, detail=detail)

    def read(self) -> Iterator[DeadLetter]:
        """Give all dead letters, the one longest not heard of first.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            ids: Any = self._client.zrange(self._keys.dead_letters, 0, -1)
        for start in range(0, len(ids), _READ_CHUNK):
            chunk = [letter_id.decode() for letter_id in ids[start : start + _READ_CHUNK]]
            with unavailable_if_down("dead letters"):
                pipeline = self._client.pipeline(transaction=False)
                for letter_id in chunk:
                    key = self._keys.letter(letter_id)
                    pipeline.hmget(key, "reason", "detail", "trace_id", "attempts", "first_ms", "last_ms")
                    pipeline.hstrlen(key, "payload")
                replies = iter(pipeline.execute())
            for letter_id, fields, size_bytes in zip(chunk, replies, replies, strict=True):
                # Dropped or expired since the index was read.
                if fields[0] is not None:
                    reason, detail, trace_id = (field.decode() for field in fields[:3])
                    attempts, first_ms, last_ms = map(int, fields[3:])
                    yield DeadLetter(letter_id, reason, detail, trace_id, attempts, first_ms, last_ms, size_bytes)

    def payload(self, letter_id: str) -> bytes:
        """Give a dead letter's payload; empty if there is no such letter any more.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            found: Any = self._client.hget(self._keys.letter(letter_id), "payload")
        return found or b""

    def drop(self, letter_id: str) -> bool:
        """Remove a dead letter for good; return whether there was one.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("dead letters"):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.delete(self._keys.letter(letter_id))
            pipeline.zrem(self._keys.dead_letters, letter_id)
            removed, _ = pipeline.execute()
        return bool(removed)
