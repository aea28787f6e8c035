"""What novelty is compared with in Redis: logs, each a stream, and pinned sets, each a hash that is replaced as a whole.

The directory says where they are, so that nobody looks through the names of all keys to list them.
"""

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import redis

from kp_scorer.errors import WindowDiffers
from kp_scorer.novelty.log import Candidate, Cursor, Entry, Erasure, Place, Tail, Window
from kp_scorer.novelty.pins import PinnedSet
from kp_scorer.store.connection import reports_outages
from kp_scorer.store.keys import Keys, LogKeys
from kp_scorer.store.records import number_in, text_in
from kp_scorer.store.scripts import VECTOR, script

_ALL: Final = b"all"
_KEPT_S: Final = 86_400
SCANNED_AT_ONCE: Final = 2_000  # Names of keys; Redis does nothing else meanwhile, for a millisecond or two.


def listed_keys(client: redis.Redis, keys: Keys) -> list[str]:
    """The keys of all novelty logs and pinned sets, in order; some may be gone.

    This looks through the names of all keys where the directory has expired, or is not there yet.
    """
    listed: Any = client.hgetall(keys.directory)
    if _ALL not in listed:
        kinds = {keys.any_log: "stream", keys.any_pinned_set: "hash"}
        listed = [key for each, kind in kinds.items() for key in client.scan_iter(each, SCANNED_AT_ONCE, _type=kind)]
        # A full Redis takes none, and the next command looks again.
        with client.pipeline(transaction=False) as step, suppress(redis.exceptions.ResponseError):
            list_keys(step, keys, [*listed, _ALL])
            step.execute()
    return sorted(text_in(key) for key in listed if key != _ALL)


def list_keys(step: "redis.client.Pipeline", keys: Keys, added: Iterable[bytes | str]) -> None:
    """Add keys in this step, as the script that appends adds that of a log."""
    step.hset(keys.directory, mapping=dict.fromkeys(added, 1))
    step.expire(keys.directory, _KEPT_S)


READ_CHUNK: Final = 1_000  # Entries in one round trip, 1.6 MB of 384 float32 each: catching up must not stall Redis.
_OPTIONAL: Final = frozenset({b"c", b"vd"})
"""Fields that not all entries have: ``c`` is 0 in those that do not count for all, ``vd`` the digest that copies share."""


class LogInfo(NamedTuple):
    """What a log holds; ``window`` is the one that its writers share, None if it has no writer yet."""

    space: str
    entries: int
    oldest: Place | None
    bytes: int
    window: Window | None


@script(tuple[bytes, list[bytes], bytes, bytes, int, list[Any], list[Any]])
def _append(
    *,
    keys: LogKeys,
    directory: str,
    records: Sequence[str],
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
    """One space's log, which the first entry creates. ServiceUnavailable if Redis cannot be reached."""

    def __init__(self, client: redis.Redis, keys: Keys, space: str, window: Window, record_ttl_ms: int) -> None:
        self._client = client
        self._keys = keys
        self.space = space
        self._own = keys.of_log(space)
        self._window = window
        self._record_ttl_ms = record_ttl_ms

    def append(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Append and read on, in one round trip; see :class:`~kp_scorer.novelty.log.NoveltyLog`."""
        other_window, places, epoch, last_trace_id, has_last_erasure, new, erased = _append(
            self._client,
            keys=self._own,
            directory=self._keys.directory,
            records=[self._keys.record(candidate.trace_id) for candidate in candidates],
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
            # Emptied, or back from a backup or a replica that is behind: what the mirror read is not the log's any more.
            tail = Tail(tail.epoch, (), (), restart=True, more=True)
        return [_place_in(place) if place else None for place in places], tail

    def entries(self) -> Iterator[Entry]:
        """Read the whole log, oldest first, in chunks."""
        start = "-"
        while True:
            chunk: Any = self._client.xrange(self._own.log, start, "+", READ_CHUNK)
            for entry_id, fields in chunk:
                yield _entry(entry_id, list(chain(*fields.items())))
            if len(chunk) < READ_CHUNK:
                return
            start = f"({chunk[-1][0].decode()}"

    def newest(self, count: int) -> list[str]:
        """The ids of the traces of the newest entries, at most ``count``, newest first."""
        entries: Any = self._client.xrevrange(self._own.log, count=count)
        return [_entry(entry_id, list(chain(*fields.items()))).trace_id for entry_id, fields in entries]

    def erase(self, *trace_ids: str) -> Counter[str]:
        """Remove traces' vectors from the log and, as soon as they read on, from all mirrors; return how many each had."""
        erased, start = Counter[str](), "-"
        # The log itself knows: a record that has expired, and one after it, has forgotten the places of the first.
        while start:
            last, owners = _erase_entries(
                self._client,
                keys=self._own,
                start=start,
                count=READ_CHUNK,
                erasures_ttl_ms=self._window.ttl_ms + self._window.slack_ms,
                most=self._window.kept_elements,
                record_prefix=self._keys.record(""),
                trace_ids=trace_ids,
            )
            erased.update(map(text_in, owners))
            start = f"({text_in(last)}" if last else ""
        return erased

    def clear(self) -> None:
        """Empty the log; mirrors notice when they next read."""
        self._client.delete(self._own.log, self._own.head, self._own.erasures)

    def info(self) -> LogInfo:
        """What the log holds."""
        entries = int(self._client.xlen(self._own.log))
        used: Any = self._client.memory_usage(self._own.log, samples=0) or 0
        oldest: Any = self._client.xrange(self._own.log, count=1)
        window: Any = self._client.hget(self._own.head, "window")
        return LogInfo(self.space, entries, _place_in(oldest[0][0]) if oldest else None, int(used), _window_in(window))


def _entry(entry_id: bytes, fields: Sequence[bytes]) -> Entry:
    """An entry; without trace and vector if it is damaged, as one that was erased: its place is another's for nobody."""
    place = _place_in(entry_id)
    # It may have other fields, or ones that hold no text or no vector.
    with suppress(ValueError):
        _, trace_id, _, digest, _, raw, *names_and_values = fields
        more = dict(zip(names_and_values[::2], names_and_values[1::2], strict=True))
        vector = np.frombuffer(raw, VECTOR).astype(np.float32)
        if np.isfinite(vector).all() and more.keys() <= _OPTIONAL and more.get(b"c", b"0") == b"0":
            return Entry(place, trace_id.decode(), digest, vector, b"c" not in more, more.get(b"vd", b""))
    return Entry(place, "", b"", np.empty(0, np.float32))


def _place_in(field: bytes) -> Place:
    """The place in a field; where nothing is, if it is none."""
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
    return f"{differences}: the log {space} was begun otherwise; make them equal, or empty it with `kp-scorer cache clear`"


def _in_words(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.12g}"


def _is_lost(cursor: Cursor, last_trace_id: bytes, erasures: Sequence[Erasure]) -> bool:
    """Whether the cursor's entry is not in the log any more, and was not erased either."""
    # Its trace id too: a log that was failed over may have the same place for another trace.
    if not cursor.trace_id or text_in(last_trace_id) == cursor.trace_id:
        return False
    return bool(last_trace_id) or all(erasure.place != cursor.place for erasure in erasures)


MOST_ENTRIES: Final = 100_000  # Of a set: 154 MB of 384 float32 each, in Redis and in each worker.
_CHUNK: Final = 1_000  # Entries written or read in one round trip.
_WRITING_MS: Final = 60_000  # How long what has been written of a set waits for the next chunk.
_DESCRIBED: Final = ("space", "name", "kind", "version", "entries")


@reports_outages("pinned sets")
class RedisPinnedSets:
    """The sets of one space; see :class:`~kp_scorer.novelty.pins.PinnedSets`. ServiceUnavailable if Redis cannot be reached."""

    def __init__(self, client: redis.Redis, keys: Keys, space: str) -> None:
        self._client = client
        self._keys = keys
        self._space = space

    def replace(self, name: str, pinned: PinnedSet, check_room: Callable[[], object]) -> None:
        """Write a set, and put it in the place of the one of this name in one step; call ``check_room`` before each chunk."""
        key = self._keys.pinning(uuid.uuid4().hex)
        described = (self._space, name, pinned.kind, pinned.version, len(pinned.ids))
        fields: dict[Any, Any] = dict(zip(_DESCRIBED, described, strict=True))
        for number, start in enumerate(range(0, len(pinned.ids), _CHUNK)):
            check_room()
            fields[f"ids:{number}"] = json.dumps(pinned.ids[start : start + _CHUNK])
            fields[f"vectors:{number}"] = pinned.vectors[start : start + _CHUNK].astype(VECTOR).tobytes()
            self._client.hset(key, mapping=fields)
            self._client.pexpire(key, _WRITING_MS)
            fields.clear()
        with self._client.pipeline(transaction=True) as step:
            step.persist(key)
            step.rename(key, pinned_key := self._keys.pinned_set(self._space, name))
            list_keys(step, self._keys, [pinned_key])
            step.execute()

    def versions(self, names: Sequence[str]) -> list[str | None]:
        """The version of each of these sets, in one round trip; None for one that does not exist."""
        with self._client.pipeline(transaction=False) as reads:
            for name in names:
                reads.hget(self._keys.pinned_set(self._space, name), "version")
            return [None if version is None else text_in(version) for version in reads.execute()]

    def read(self, name: str) -> PinnedSet | None:
        """A set as it is now; None if it does not exist, or is damaged."""
        key = self._keys.pinned_set(self._space, name)
        fields: Any = self._client.hmget(key, ("kind", "version", "entries"))
        kind, version, numbers = *map(text_in, fields[:2]), range(-(-min(number_in(fields[2]), MOST_ENTRIES) // _CHUNK))
        chunks: Any = [self._client.hmget(key, f"ids:{n}", f"vectors:{n}") for n in numbers]
        if self.versions([name]) != [version or None]:
            # It was replaced meanwhile.
            return self.read(name)
        with suppress(ValueError, TypeError):
            ids = [entry for names, _ in chunks for entry in json.loads(names)]
            rows = np.frombuffer(b"".join(vectors for _, vectors in chunks), VECTOR).reshape(len(ids), -1)
            pinned = PinnedSet(kind, ids, rows.astype(np.float32, copy=False))  # type: ignore[arg-type]  # by its version
            return pinned if pinned.version == version and np.isfinite(rows).all() else None
        return None

    def remove(self, name: str) -> None:
        """Remove a set; workers whose settings name it decide nothing until it is there again."""
        self._client.delete(key := self._keys.pinned_set(self._space, name))
        self._client.hdel(self._keys.directory, key)


def describe_pinned_sets(client: redis.Redis, keys: Keys) -> Iterator[dict[str, Any]]:
    """Describe the sets of all spaces: space, name, kind, version, entries, and the bytes that each takes."""
    prefix = keys.any_pinned_set.removesuffix("*")
    for key in (each for each in listed_keys(client, keys) if each.startswith(prefix)):
        fields: Any = client.hmget(key, _DESCRIBED)
        if None in fields:
            continue
        used: Any = client.memory_usage(key, samples=0)
        texts = map(text_in, fields[:-1])
        yield {**dict(zip(_DESCRIBED, texts, strict=False)), "entries": number_in(fields[-1]), "bytes": int(used or 0)}
