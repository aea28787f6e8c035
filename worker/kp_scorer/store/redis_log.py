"""The novelty log as a Redis stream, shared by all workers."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import redis
from numpy.typing import NDArray

from kp_scorer.novelty.log import Candidate, Cursor, Entry, Place, Tail, Window
from kp_scorer.settings import VectorType
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys
from kp_scorer.store.scripts import lua_source

READ_CHUNK: Final = 1_000
"""Entries read in one round trip (1.6 MB of 384 float32 each): a late worker catches up without stalling Redis."""

_NO_VECTOR: Final = np.empty(0, np.float32)


class LogInfo(NamedTuple):
    """What a log holds."""

    space: str
    vector_type: VectorType
    entries: int
    oldest: Place | None
    bytes: int
    """Memory that Redis uses for it."""


class RedisLog:
    """One space's log. Vectors lie in it as little-endian float32, or as float16 for half the memory."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keys,
        space: str,
        window: Window,
        record_ttl_ms: int,
        vector_type: VectorType = "float32",
    ) -> None:
        """Use the log of ``space``; creates nothing until the first admission."""
        self._client = client
        self._keys = keys
        # Rounded vectors are not comparable with others, so they get a log of their own.
        self._space = space if vector_type == "float32" else f"{space}.{vector_type}"
        self._log, self._head = keys.log(self._space), keys.head(self._space)
        self._window = window
        self._record_ttl_ms = record_ttl_ms
        self._stored = np.dtype(vector_type).newbyteorder("<")
        self._admit, self._erase = (
            client.register_script(lua_source(__package__, name)) for name in ("admit", "erase_entries")
        )

    @property
    def space(self) -> str:
        """The space of its vectors, and how they are stored if that is not as float32."""
        return self._space

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit and read, in one round trip; see :class:`~kp_scorer.novelty.log.NoveltyLog`."""
        with unavailable_if_down("novelty log"):
            try:
                return self._exchange(candidates, cursor)
            except redis.exceptions.NoScriptError:
                self._client.script_load(self._admit.script)
                return self._exchange(candidates, cursor)

    def entries(self) -> Iterator[Entry]:
        """Read the whole log, oldest first, in chunks.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        start = "-"
        while True:
            with unavailable_if_down("novelty log"):
                chunk: Any = self._client.xrange(self._log, start, "+", READ_CHUNK)
            for entry_id, fields in chunk:
                yield self._entry(entry_id, fields)
            if len(chunk) < READ_CHUNK:
                return
            start = f"({chunk[-1][0].decode()}"

    def erase(self, trace_id: str) -> int:
        """Remove a trace's vectors from the log and, as soon as they read on, from all mirrors; return how many there were.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            record: Any = self._client.hmget(self._keys.record(trace_id), "epoch", "entry", "given_up")
            epoch, entry, given_up = record
            if epoch and epoch == self._client.hget(self._head, "epoch"):
                places = [entry, *(given_up or b"").split()]
            else:
                # Its record has expired, or is of another log; the log itself knows.
                places = [str(found.place) for found in self.entries() if found.trace_id == trace_id]
            return int(self._erase(keys=[self._log, self._head], args=places)) if places else 0

    def clear(self) -> None:
        """Empty the log; mirrors notice when they next read.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            self._client.delete(self._log, self._head)

    def info(self) -> LogInfo:
        """Say what the log holds.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            oldest: Any = self._client.xrange(self._log, count=1)
            entries = int(self._client.xlen(self._log))
            used: Any = self._client.memory_usage(self._log, samples=0) or 0
        return LogInfo(
            space=self._space,
            vector_type="float16" if self._stored.itemsize == 2 else "float32",
            entries=entries,
            oldest=Place.parse(oldest[0][0].decode()) if oldest else None,
            bytes=int(used),
        )

    def _exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        last = str(cursor.place) if cursor and cursor.place else None
        # A transaction, so that no clearing of the log can fall between its epoch and its entries.
        pipeline = self._client.pipeline(transaction=True)
        if candidates:
            self._add_admission(pipeline, candidates)
        pipeline.hget(self._head, "epoch")
        pipeline.xrange(self._log, last or "0-0", last or "0-0")
        pipeline.xrange(self._log, f"({last}" if last else "-", "+", READ_CHUNK)
        *admitted, epoch, last_read, newer = pipeline.execute()
        tail = self._tail(cursor, epoch, last_read, newer)
        entries = admitted[0] if admitted else []
        return [Place.parse(entry.decode()) if entry else None for entry in entries], tail

    def _add_admission(self, pipeline: redis.client.Pipeline, candidates: Sequence[Candidate]) -> None:
        window = self._window
        keys = [self._log, self._head, *(self._keys.record(candidate.trace_id) for candidate in candidates)]
        arguments: list[str | bytes | int] = [
            uuid.uuid4().hex,
            window.max_elements,
            window.ttl_ms,
            window.slack_elements,
            window.slack_ms,
            self._record_ttl_ms,
        ]
        for candidate in candidates:
            arguments += [candidate.trace_id, candidate.digest, candidate.vector.astype(self._stored).tobytes()]
        pipeline.evalsha(self._admit.sha, len(keys), *keys, *arguments)

    def _tail(self, cursor: Cursor | None, epoch: bytes | None, last_read: list[Any], newer: list[Any]) -> Tail:
        current = epoch.decode() if epoch else ""
        entries = [self._entry(entry_id, fields) for entry_id, fields in newer]
        if cursor is not None and not _still_there(cursor, current, last_read, entries):
            # Emptied, or back from a backup or a replica that is behind: what the mirror read is not the log's any more.
            return Tail(current, (), restart=True, more=True)
        return Tail(current, entries, restart=False, more=len(newer) == READ_CHUNK)

    def _entry(self, entry_id: bytes, fields: dict[bytes, bytes]) -> Entry:
        place = Place.parse(entry_id.decode())
        if b"e" in fields:
            return Entry(place, "", b"", _NO_VECTOR, erases=Place.parse(fields[b"e"].decode()))
        return Entry(place, fields[b"i"].decode(), fields[b"d"], self._vector(fields[b"v"]))

    def _vector(self, raw: bytes) -> NDArray[np.float32]:
        vector = np.frombuffer(raw, self._stored).astype(np.float32)
        # Rounding to float16 changes the length; a similarity is a cosine only between unit vectors.
        return vector if self._stored.itemsize == 4 else vector / np.linalg.norm(vector)


def find_logs(client: redis.Redis, keys: Keys, window: Window, record_ttl_ms: int) -> list[RedisLog]:
    """The logs that exist under a prefix, of whatever space and type of vectors.

    Raises:
        ServiceUnavailable: Redis cannot be reached.
    """
    with unavailable_if_down("novelty log"):
        found = sorted(key.decode() for key in client.scan_iter(keys.any_log, _type="stream"))
    logs = []
    for key in found:
        space, _, suffix = key.removeprefix(keys.log("")).partition(".float")
        logs.append(RedisLog(client, keys, space, window, record_ttl_ms, "float16" if suffix else "float32"))
    return logs


def _still_there(cursor: Cursor, epoch: str, last_read: list[Any], newer: Sequence[Entry]) -> bool:
    if cursor.epoch != epoch:
        return False
    if cursor.place is None or any(entry.erases == cursor.place for entry in newer):
        return True
    # Its trace id too: a failed-over log may give the same place to another trace.
    return bool(last_read) and last_read[0][1][b"i"].decode() == cursor.trace_id
