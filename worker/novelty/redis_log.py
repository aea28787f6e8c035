"""The novelty log as a Redis stream, shared by all workers."""

import uuid
from collections.abc import Sequence
from importlib import resources
from typing import Any, Final

import numpy as np
import redis

from worker.keys import Keys
from worker.novelty.log import Candidate, Cursor, Entry, Place, Tail, Window
from worker.redis_client import unavailable_if_down

READ_CHUNK: Final = 1_000
"""Entries read in one round trip (1.6 MB of 384 float32 each): a late worker catches up without stalling Redis."""


class RedisLog:
    """One space's log. Vectors travel and lie as little-endian float32."""

    def __init__(self, client: redis.Redis, keys: Keys, space: str, window: Window, record_ttl_ms: int) -> None:
        """Use the log of ``space``; creates nothing until the first admission."""
        self._client = client
        self._keys = keys
        self._space = space
        self._window = window
        self._record_ttl_ms = record_ttl_ms
        self._admit = client.register_script(resources.files(__package__).joinpath("admit.lua").read_text("utf-8"))

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit and read, in one round trip; see :class:`~worker.novelty.log.NoveltyLog`."""
        with unavailable_if_down("novelty log"):
            try:
                return self._exchange(candidates, cursor)
            except redis.exceptions.NoScriptError:
                self._client.script_load(self._admit.script)
                return self._exchange(candidates, cursor)

    def _exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        log = self._keys.log(self._space)
        place = cursor.place if cursor else None
        # A transaction, so that no clearing of the log can fall between its epoch and its entries.
        pipeline = self._client.pipeline(transaction=True)
        if candidates:
            self._add_admission(pipeline, candidates)
        pipeline.hget(self._keys.head(self._space), "epoch")
        pipeline.xrange(log, str(place), str(place)) if place else pipeline.xrange(log, "0-0", "0-0")
        pipeline.xrange(log, f"({place}" if place else "-", "+", READ_CHUNK)
        replies = pipeline.execute()
        tail = self._tail(cursor, *replies[-3:])
        admitted = replies[0][1:] if candidates else []
        return [Place.parse(entry.decode()) if entry else None for entry in admitted], tail

    def _add_admission(self, pipeline: redis.client.Pipeline, candidates: Sequence[Candidate]) -> None:
        window = self._window
        keys = [self._keys.log(self._space), self._keys.head(self._space)]
        keys += [self._keys.record(candidate.trace_id) for candidate in candidates]
        arguments: list[str | bytes | int] = [
            uuid.uuid4().hex,
            window.max_elements,
            window.ttl_ms,
            window.slack_elements,
            window.slack_ms,
            self._record_ttl_ms,
            self._space,
        ]
        for candidate in candidates:
            arguments += [candidate.trace_id, candidate.content, candidate.vector.astype("<f4").tobytes()]
        pipeline.evalsha(self._admit.sha, len(keys), *keys, *arguments)

    def _tail(self, cursor: Cursor | None, epoch: bytes | None, last_read: list[Any], newer: list[Any]) -> Tail:
        current = epoch.decode() if epoch else ""
        if cursor is not None and not _still_there(cursor, current, last_read):
            # Emptied, or back from a backup or a replica that is behind: what the mirror read is not the log's any more.
            return Tail(current, (), restart=True, more=True)
        entries = [_entry(entry_id, fields) for entry_id, fields in newer]
        return Tail(current, entries, restart=False, more=len(newer) == READ_CHUNK)


def _still_there(cursor: Cursor, epoch: str, last_read: list[Any]) -> bool:
    if cursor.epoch != epoch:
        return False
    if cursor.place is None:
        return True
    # Its trace id too: a failed-over log may give the same place to another trace.
    return bool(last_read) and last_read[0][1][b"i"].decode() == cursor.trace_id


def _entry(entry_id: bytes, fields: dict[bytes, bytes]) -> Entry:
    vector = np.frombuffer(fields[b"v"], dtype="<f4").astype(np.float32, copy=False)
    return Entry(Place.parse(entry_id.decode()), fields[b"i"].decode(), fields[b"c"], vector)
