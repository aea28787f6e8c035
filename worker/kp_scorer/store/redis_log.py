"""The novelty log as a Redis stream, shared by all workers."""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import redis
from numpy.typing import NDArray

from kp_scorer.errors import SettingsError
from kp_scorer.novelty.log import Candidate, Cursor, Entry, Erasure, Place, Tail, Window
from kp_scorer.settings import VectorType
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys
from kp_scorer.store.scripts import lua_source

READ_CHUNK: Final = 1_000
"""Entries read in one round trip (1.6 MB of 384 float32 each): a late worker catches up without stalling Redis."""


class LogInfo(NamedTuple):
    """What a log holds."""

    space: str
    vector_type: VectorType
    entries: int
    oldest: Place | None
    bytes: int
    """Memory that Redis uses for it."""
    window: Window | None
    """The one that its writers share; None if it has no writer yet."""


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
        self._log, self._head, self._erased = keys.log(self._space), keys.head(self._space), keys.erased(self._space)
        self._window = window
        self._record_ttl_ms = record_ttl_ms
        self._stored = np.dtype(vector_type).newbyteorder("<")
        self._exchange, self._erase = (
            client.register_script(lua_source(__package__, name)) for name in ("exchange", "erase_entries")
        )

    @property
    def space(self) -> str:
        """The space of its vectors, and how they are stored if that is not as float32."""
        return self._space

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit and read, in one round trip; see :class:`~kp_scorer.novelty.log.NoveltyLog`."""
        window = self._window
        keys = [self._log, self._head, self._erased, *(self._keys.record(candidate.trace_id) for candidate in candidates)]
        arguments: list[str | bytes | int] = [
            uuid.uuid4().hex,
            window.max_elements,
            window.ttl_ms,
            window.slack_elements,
            window.slack_ms,
            self._record_ttl_ms,
            str(cursor.place) if cursor and cursor.place else "",
            cursor.erasure if cursor else "",
            READ_CHUNK,
        ]
        for candidate in candidates:
            arguments += [candidate.trace_id, candidate.digest, candidate.vector.astype(self._stored).tobytes()]
        with unavailable_if_down("novelty log"):
            places, *read = self._exchange(keys=keys, args=arguments)
        if not read:
            raise SettingsError(_disagreement(self._space, Window.parse(places.decode()), window))
        return [Place.parse(place.decode()) if place else None for place in places], self._tail(cursor, *read)

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
                yield self._entry(entry_id, [part for field in fields.items() for part in field])
            if len(chunk) < READ_CHUNK:
                return
            start = f"({chunk[-1][0].decode()}"

    def newest(self, count: int) -> list[str]:
        """The ids of the traces of the newest entries, at most ``count``, newest first.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            found: Any = self._client.xrevrange(self._log, count=count)
        return [
            self._entry(entry_id, [part for field in fields.items() for part in field]).trace_id for entry_id, fields in found
        ]

    def erase(self, trace_id: str) -> int:
        """Remove a trace's vectors from the log and, as soon as they read on, from all mirrors; return how many there were.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            # The log itself knows: a record that has expired, and one after it, has forgotten the places of the first.
            places = [str(found.place) for found in self.entries() if found.trace_id == trace_id]
            if not places:
                return 0
            keys = [self._log, self._erased, self._keys.record(trace_id)]
            kept_ms = self._window.ttl_ms + self._window.slack_ms
            return int(self._erase(keys=keys, args=[kept_ms, self._window.kept_elements, *places]))

    def clear(self) -> None:
        """Empty the log; mirrors notice when they next read.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            self._client.delete(self._log, self._head, self._erased)

    def info(self) -> LogInfo:
        """Say what the log holds.

        Raises:
            ServiceUnavailable: the log cannot be reached.
        """
        with unavailable_if_down("novelty log"):
            oldest: Any = self._client.xrange(self._log, count=1)
            entries = int(self._client.xlen(self._log))
            used: Any = self._client.memory_usage(self._log, samples=0) or 0
            window: Any = self._client.hget(self._head, "window")
        return LogInfo(
            space=self._space,
            vector_type="float16" if self._stored.itemsize == 2 else "float32",
            entries=entries,
            oldest=Place.parse(oldest[0][0].decode()) if oldest else None,
            bytes=int(used),
            window=Window.parse(window.decode()) if window else None,
        )

    def _tail(
        self, cursor: Cursor | None, epoch: bytes, last_read: bytes, knows_erasure: int, newer: list[Any], erased: list[Any]
    ) -> Tail:
        current = epoch.decode()
        entries = [self._entry(entry_id, fields) for entry_id, fields in newer]
        erasures = [Erasure(erasure_id.decode(), Place.parse(fields[1].decode())) for erasure_id, fields in erased]
        if cursor is not None and (cursor.epoch != current or not knows_erasure or _is_lost(cursor, last_read, erasures)):
            # Emptied, or back from a backup or a replica that is behind: what the mirror read is not the log's any more.
            return Tail(current, (), (), restart=True, more=True)
        return Tail(current, entries, erasures, restart=False, more=READ_CHUNK in (len(newer), len(erased)))

    def _entry(self, entry_id: bytes, fields: Sequence[bytes]) -> Entry:
        _, trace_id, _, digest, _, vector = fields
        return Entry(Place.parse(entry_id.decode()), trace_id.decode(), digest, self._vector(vector))

    def _vector(self, raw: bytes) -> NDArray[np.float32]:
        vector = np.frombuffer(raw, self._stored).astype(np.float32)
        # Rounding to float16 changes the length; a similarity is a cosine only between unit vectors.
        return vector if self._stored.itemsize == 4 else vector / np.linalg.norm(vector)


def _disagreement(space: str, noted: Window, own: Window) -> str:
    ours = own.as_settings()
    differing = [
        f"novelty.{name} is {theirs:.12g} there and {ours[name]:.12g} here"
        for name, theirs in noted.as_settings().items()
        if theirs != ours[name]
    ]
    what = ", ".join(differing)
    return f"{what}: the log {space} was begun otherwise; make them equal, or empty it with `kp-scorer cache clear`"


def _is_lost(cursor: Cursor, last_read: bytes, erasures: Sequence[Erasure]) -> bool:
    """Whether the cursor's entry is not in the log any more, and was not erased either."""
    # Its trace id too: a log that was failed over may have the same place for another trace.
    if not cursor.trace_id or last_read.decode() == cursor.trace_id:
        return False
    return bool(last_read) or all(erasure.place != cursor.place for erasure in erasures)


def find_logs(client: redis.Redis, keys: Keys, window: Window, record_ttl_ms: int) -> list[RedisLog]:
    """The logs that exist under a prefix, of whatever space and type of vectors.

    Raises:
        ServiceUnavailable: Redis cannot be reached.
    """
    with unavailable_if_down("novelty log"):
        streams = [key.decode() for key in client.scan_iter(keys.any_log, _type="stream")]
    logs = []
    for stored in sorted(filter(None, map(keys.space_of, streams))):
        space, _, suffix = stored.partition(".float")
        logs.append(RedisLog(client, keys, space, window, record_ttl_ms, "float16" if suffix else "float32"))
    return logs
