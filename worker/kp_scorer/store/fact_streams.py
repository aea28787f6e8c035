"""The facts of decisions in Redis, for the gate: a stream of the newest ones, and one of those whose traces are kept."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import redis

from kp_scorer.gate import Fact, GateBounds
from kp_scorer.gate.facts import DAMAGES, Facts, StoredFact, parse_facts, parse_place
from kp_scorer.novelty.log import Place
from kp_scorer.store.connection import reports_outages
from kp_scorer.store.keys import FactKeys, KeptFactKeys, Keys
from kp_scorer.store.novelty_log import READ_CHUNK, erase_entries


@reports_outages("gate")
class RedisFacts:
    """The facts of one space, which the first commit under a gate creates.

    Raises ServiceUnavailable if Redis cannot be reached.
    """

    def __init__(self, client: redis.Redis, keys: Keys, space: str, bounds: GateBounds) -> None:
        self._client = client
        self._record_prefix = keys.record_prefix
        self.space = space
        self.keys = FactKeys(keys.of_facts(space))
        self.kept_keys = KeptFactKeys(keys.of_facts(space))
        self.bounds = bounds

    def read(self, after: Place | None) -> Facts:
        """Read the facts that are newer than a place; see :class:`~kp_scorer.gate.facts.FactLog`."""
        kept_facts = () if after else tuple(self.all_kept())
        entries = self._entries(self.keys.log, str(after or "-"))
        if after:
            if not entries or entries[0][0] != str(after).encode():
                # The entry at this place was trimmed or erased, or Redis came back without it.
                return Facts((), restart=True)
            del entries[0]
        return Facts(_stored(entries), kept_facts, more=len(entries) >= READ_CHUNK)

    def all(self) -> Iterator[StoredFact]:
        """Yield all of the newest facts, oldest first; read them in chunks."""
        return self._all(self.keys.log)

    def all_kept(self) -> Iterator[StoredFact]:
        """Yield the facts of all kept traces, oldest first; read them in chunks."""
        return self._all(self.kept_keys.log)

    def _all(self, stream: str) -> Iterator[StoredFact]:
        start = "-"
        while entries := self._entries(stream, start):
            yield from _stored(entries)
            start = f"({entries[-1][0].decode()}"

    def _entries(self, stream: str, start: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        entries: Any = self._client.xrange(stream, start, count=READ_CHUNK + 1)
        return list(entries)

    def erase(self, *trace_ids: str) -> Counter[str]:
        """Remove the facts of traces; return the number of facts by trace. Workers that see the notes read all facts anew."""
        erased = [
            erase_entries(self._client, keys, self._record_prefix, trace_ids, self.bounds.kept_ttl_ms, self.bounds.most_facts)
            for keys in (self.keys, self.kept_keys)
        ]
        return erased[0] | erased[1]

    def clear(self) -> None:
        """Remove all facts; workers notice at their next read."""
        self._client.delete(self.keys.log, self.kept_keys.log)

    def info(self) -> dict[str, Any]:
        """Return a description of the kept traces of this space."""
        sizes: Sequence[Any] = [self._client.memory_usage(each.log) or 0 for each in (self.keys, self.kept_keys)]
        places = set[Place | None]()
        for each in self.all_kept():
            if each.fact:
                places.add(each.place)
            places.discard(each.dropped)
        return {"space": self.space, "kept": len(places), "bytes": sum(sizes)}


def _stored(entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> list[StoredFact]:
    with_facts = [fields for _, fields in entries if b"f" in fields]
    facts: Iterator[Fact | None]
    try:
        facts = iter(parse_facts([each[b"f"] for each in with_facts], b"".join(each.get(b"v", b"") for each in with_facts)))
    except DAMAGES:
        facts = map(_fact, with_facts)
    return [_entry(Place.parse(place.decode()), fields, next(facts) if b"f" in fields else None) for place, fields in entries]


def _fact(fields: dict[bytes, bytes]) -> Fact | None:
    """Parse one fact. Anyone with write access to Redis can store garbage here."""
    with suppress(*DAMAGES):
        (fact,) = parse_facts([fields[b"f"]], fields.get(b"v", b""))
        return fact
    return None


def _entry(place: Place, fields: dict[bytes, bytes], fact: Fact | None) -> StoredFact:
    if b"f" in fields:
        is_late = b"r" in fields
        return StoredFact(place, fact._replace(is_kept=True) if fact and is_late else fact, is_late)
    with suppress(*DAMAGES):
        if b"r" in fields:
            return StoredFact(place, dropped=parse_place(fields[b"r"].decode()))
        return StoredFact(place, erased=parse_place(fields.get(b"e", b"").decode()))
    return StoredFact(place)
