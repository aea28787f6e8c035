"""The pinned sets in Redis: each a hash that is replaced as a whole."""

import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np
import redis

from kp_scorer.novelty.pins import PinnedSet
from kp_scorer.store.connection import in_one_trip, names_of, reports_outages
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import number_in, text_in
from kp_scorer.store.scripts import VECTOR

MOST_ENTRIES: Final = 100_000  # They take 154 MB at 384 float32 each, in Redis and in each worker.
_CHUNK: Final = 1_000  # Entries written or read in one round trip.
_WRITING_MS: Final = 60_000  # A set that is being written expires if the next chunk takes longer.
_DESCRIBED: Final = ("space", "name", "kind", "version", "entries")


@reports_outages("pinned sets")
class RedisPinnedSets:
    """The sets of one space; see :class:`~kp_scorer.novelty.pins.PinnedSets`. Raises ServiceUnavailable without Redis."""

    def __init__(self, client: redis.Redis, keys: Keys, space: str) -> None:
        self._client = client
        self._keys = keys
        self._space = space

    def replace(self, name: str, pinned: PinnedSet, check_room: Callable[[], object]) -> None:
        """Write a set, then replace the set of this name in one step; call ``check_room`` before each chunk."""
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
            step.rename(key, self._keys.pinned_set(self._space, name))
            step.execute()

    def versions(self, names: Sequence[str]) -> list[str | None]:
        """Return the version of each of these sets, in one round trip; None for a set that does not exist."""
        versions = in_one_trip(self._client, (("HGET", self._keys.pinned_set(self._space, name), "version") for name in names))
        return [None if version is None else text_in(version) for version in versions]

    def read(self, name: str) -> PinnedSet | None:
        """Read a set; return None if it does not exist or is damaged."""
        key = self._keys.pinned_set(self._space, name)
        fields: Any = self._client.hmget(key, ("kind", "version", "entries"))
        kind, version, numbers = *map(text_in, fields[:2]), range(-(-min(number_in(fields[2]), MOST_ENTRIES) // _CHUNK))
        chunks: Any = [self._client.hmget(key, f"ids:{n}", f"vectors:{n}") for n in numbers]
        if self.versions([name]) != [version or None]:
            # The set was replaced while it was read.
            return self.read(name)
        with suppress(ValueError, TypeError):
            ids = [entry for names, _ in chunks for entry in json.loads(names)]
            rows = np.frombuffer(b"".join(vectors for _, vectors in chunks), VECTOR).reshape(len(ids), -1)
            pinned = PinnedSet(kind, ids, rows.astype(np.float32, copy=False))  # type: ignore[arg-type]  # by its version
            return pinned if pinned.version == version and np.isfinite(rows).all() else None
        return None

    def remove(self, name: str) -> None:
        """Remove a set; workers whose settings name it decide nothing until it is pinned again."""
        self._client.delete(self._keys.pinned_set(self._space, name))


def describe_pinned_sets(client: redis.Redis, keys: Keys) -> Iterator[dict[str, Any]]:
    """Yield the space, name, kind, version, entries and bytes of each set of all spaces."""
    for key in sorted(set(names_of(client, keys.any_pinned_set, "hash"))):
        fields: Any = client.hmget(key, _DESCRIBED)
        if None in fields:
            continue
        used: Any = client.memory_usage(key, samples=0)
        texts = map(text_in, fields[:-1])
        yield {**dict(zip(_DESCRIBED, texts, strict=False)), "entries": number_in(fields[-1]), "bytes": int(used or 0)}
