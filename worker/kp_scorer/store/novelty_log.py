"""The novelty logs in Redis, each a stream."""

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import redis

from kp_scorer.errors import WindowDiffers
from kp_scorer.novelty.log import Candidate, Cursor, Entry, Erasure, Place, Tail, Window
from kp_scorer.store.connection import entries_in, reports_outages
from kp_scorer.store.keys import Keys, LogKeys
from kp_scorer.store.records import text_in
from kp_scorer.store.scripts import VECTOR, script

READ_CHUNK: Final = 1_000  # Entries in one round trip, 1.6 MB at 384 float32 each: catching up must not stall Redis.
_OPTIONAL: Final = frozenset({b"c", b"vd"})
"""Optional fields of an entry: ``c`` is 0 if only some traces are compared with it, ``vd`` is the digest that copies share."""


class LogInfo(NamedTuple):
    """The size of a log, and the window that its workers share; None before the first entry."""

    space: str
    entries: int
    oldest: Place | None
    bytes: int
    window: Window | None


@script(tuple[bytes, list[bytes], bytes, bytes, int, list[Any], list[Any]])
def _append(
    *,
    keys: LogKeys,
    record_prefix: str,
    new_epoch: str,
    window: str,
    record_ttl_ms: int,
    last_entry: str,
    last_erasure: str,
    most: int,
    candidates: Sequence[Candidate],
) -> None: ...


@script(tuple[bytes, list[bytes]])
def _erase_entries(
    *, keys: LogKeys, start: str, count: int, erasures_ttl_ms: int, most: int, record_prefix: str, trace_ids: Sequence[str]
) -> None: ...


@reports_outages("novelty log")
class RedisLog:
    """The log of one space, which its first entry creates. Raises ServiceUnavailable if Redis cannot be reached."""

    def __init__(self, client: redis.Redis, keys: Keys, space: str, window: Window, record_ttl_ms: int) -> None:
        self._client = client
        self._keys = keys
        self.space = space
        self._own = keys.of_log(space)
        self._window = window
        self._record_ttl_ms = record_ttl_ms

    def append(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Append vectors and read newer entries, in one round trip; see :class:`~kp_scorer.novelty.log.NoveltyLog`."""
        other_window, places, epoch, last_trace_id, has_last_erasure, new, erased = _append(
            self._client,
            keys=self._own,
            record_prefix=self._keys.record_prefix,
            new_epoch=uuid.uuid4().hex,
            window=str(self._window),
            record_ttl_ms=self._record_ttl_ms,
            last_entry=str(cursor.place) if cursor and cursor.place else "",
            last_erasure=cursor.erasure if cursor else "",
            most=READ_CHUNK,
            candidates=candidates,
        )
        if other_window:
            raise WindowDiffers(_disagreement(self.space, _window_in(other_window), self._window))
        entries = [_entry(entry_id, fields) for entry_id, fields in new]
        erasures = [Erasure(erasure_id.decode(), _place_in(fields[1])) for erasure_id, fields in erased]
        tail = Tail(text_in(epoch), entries, erasures, restart=False, more=READ_CHUNK in (len(entries), len(erasures)))
        if cursor and (cursor.epoch != tail.epoch or not has_last_erasure or _is_lost(cursor, last_trace_id, erasures)):
            # The log was emptied, or restored from a backup or a late replica, so the mirror must be read anew.
            tail = Tail(tail.epoch, (), (), restart=True, more=True)
        return [_place_in(place) if place else None for place in places], tail

    def entries(self) -> Iterator[Entry]:
        """Yield all entries of the log, oldest first; read them in chunks."""
        for entry_id, fields in entries_in(self._client, self._own.log, READ_CHUNK):
            yield _entry(entry_id, list(chain(*fields.items())))

    def newest(self, count: int) -> list[Entry]:
        """Return at most ``count`` of the newest entries, newest first."""
        entries: Any = self._client.xrevrange(self._own.log, count=count)
        return [_entry(entry_id, list(chain(*fields.items()))) for entry_id, fields in entries]

    def erase(self, *trace_ids: str) -> Counter[str]:
        """Remove traces' vectors from the log, and from mirrors once they read on; return the number of vectors by trace."""
        # Search the log itself: a record that expired and was made anew does not know the trace's earlier places.
        ttl_ms, most = self._window.ttl_ms + self._window.slack_ms, self._window.kept_elements
        return erase_entries(self._client, self._own, self._keys.record_prefix, trace_ids, ttl_ms, most)

    def clear(self) -> None:
        """Empty the log; mirrors notice at their next read."""
        self._client.delete(self._own.log, self._own.head, self._own.erasures)

    def info(self) -> LogInfo:
        """Return the size of the log and its window."""
        entries = int(self._client.xlen(self._own.log))
        used: Any = self._client.memory_usage(self._own.log, samples=0) or 0
        oldest: Any = self._client.xrange(self._own.log, count=1)
        window: Any = self._client.hget(self._own.head, "window")
        return LogInfo(self.space, entries, _place_in(oldest[0][0]) if oldest else None, int(used), _window_in(window))


def erase_entries(
    client: redis.Redis, keys: LogKeys, record_prefix: str, trace_ids: Sequence[str], ttl_ms: int, most: int
) -> Counter[str]:
    """Erase the entries of traces, and note each erasure for the mirrors; return the number of entries by trace.

    The notes expire after ``ttl_ms``; only about the newest ``most`` are kept.
    """
    erased, start = Counter[str](), "-"
    while start:
        last, owners = _erase_entries(
            client,
            keys=keys,
            start=start,
            count=READ_CHUNK,
            erasures_ttl_ms=ttl_ms,
            most=most,
            record_prefix=record_prefix,
            trace_ids=trace_ids,
        )
        erased.update(map(text_in, owners))
        start = f"({text_in(last)}" if last else ""
    return erased


def _entry(entry_id: bytes, fields: Sequence[bytes]) -> Entry:
    """Return the entry with these fields.

    A damaged one has neither trace nor vector, like an erased one, but keeps its place.
    """
    place = _place_in(entry_id)
    # Anyone with write access to Redis can store other fields here.
    with suppress(ValueError):
        _, trace_id, _, digest, _, raw, *names_and_values = fields
        more = dict(zip(names_and_values[::2], names_and_values[1::2], strict=True))
        vector = np.frombuffer(raw, VECTOR).astype(np.float32)
        if np.isfinite(vector).all() and more.keys() <= _OPTIONAL and more.get(b"c", b"0") == b"0":
            return Entry(place, trace_id.decode(), digest, vector, b"c" not in more, more.get(b"vd", b""))
    return Entry(place, "", b"", np.empty(0, np.float32))


def _place_in(field: bytes) -> Place:
    """Return the place in a field; if the field holds something else, return a place that no entry can have."""
    with suppress(ValueError):
        return Place.parse(field.decode())
    return Place(0, 0)


def _window_in(field: bytes | None) -> Window | None:
    with suppress(ValueError, TypeError):
        return Window.parse(text_in(field))
    return None


def _disagreement(space: str, noted: Window | None, own: Window) -> str:
    if noted is None:
        return f"the log {space} does not say with which window it was begun: empty it with `kp-scorer cache clear`"
    ours = own.as_settings()
    differing = [
        f"novelty.{name} is {_in_words(theirs)} there and {_in_words(ours[name])} here"
        for name, theirs in noted.as_settings().items()
        if theirs != ours.get(name, theirs)
    ]
    differences = ", ".join(differing) or f"its slack is {noted.slack_ms} ms there and {own.slack_ms} ms here"
    return f"{differences}: the log {space} has the former; make them equal, or empty it with `kp-scorer cache clear`"


def _in_words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.12g}"


def _is_lost(cursor: Cursor, last_trace_id: bytes, erasures: Sequence[Erasure]) -> bool:
    """Return whether the log has lost the cursor's entry in another way than by an erasure."""
    # The trace id must match too: after a failover the log may have another trace at the same place.
    if not cursor.trace_id or text_in(last_trace_id) == cursor.trace_id:
        return False
    return bool(last_trace_id) or all(erasure.place != cursor.place for erasure in erasures)
