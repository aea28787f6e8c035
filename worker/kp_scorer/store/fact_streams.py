"""The facts of decisions in Redis, for the gate: a stream of the newest ones, and one of those whose traces are kept."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from kp_scorer.gate import GateBounds
from kp_scorer.gate.facts import Entries, Entry, Facts, StoredFact
from kp_scorer.novelty.log import Place
from kp_scorer.store.connection import reports_outages
from kp_scorer.store.keys import FactKeys, KeptFactKeys, Keys
from kp_scorer.store.novelty_log import READ_CHUNK, erase_entries


@reports_outages("gate")
class RedisFacts:
    """The facts of one space, which the first commit under a gate creates. Raises ServiceUnavailable without Redis."""

    def __init__(self, client: redis.Redis, keys: Keys, space: str, bounds: GateBounds) -> None:
        self._client = client
        self._record_prefix = keys.record_prefix
        self.space = space
        self.keys = FactKeys(keys.of_facts(space))
        self.kept_keys = KeptFactKeys(keys.of_facts(space))
        self.bounds = bounds

    def read(self, after: Place | None) -> Facts:
        """Read the facts that are newer than a place; see :class:`~kp_scorer.gate.facts.FactLog`."""
        kept_entries = [] if after else [entry for chunk in self._chunks(self.kept_keys.log) for entry in chunk]
        entries = self._entries(self.keys.log, str(after or "-"))
        if after:
            if not entries or entries[0][0] != str(after).encode():
                # The entry at this place was trimmed or erased, or Redis came back without it.
                return Facts((), restart=True)
            del entries[0]
        return Facts(entries, kept_entries, more=len(entries) >= READ_CHUNK)

    def all(self) -> Iterator[StoredFact]:
        """Yield all of the newest facts, oldest first; read them in chunks."""
        for chunk in self._chunks(self.keys.log):
            yield from Entries(chunk)

    def all_kept(self) -> Iterator[StoredFact]:
        """Yield the facts of all kept traces, oldest first; read them in chunks."""
        for chunk in self._chunks(self.kept_keys.log):
            yield from Entries(chunk)

    def _chunks(self, stream: str) -> Iterator[list[Entry]]:
        start = "-"
        while entries := self._entries(stream, start):
            yield entries
            start = f"({entries[-1][0].decode()}"

    def _entries(self, stream: str, start: str) -> list[Entry]:
        # redis-py makes a dict of each entry, a quarter of the cost of reading them, unless the command's name is bytes.
        client: Any = self._client
        entries: list[Entry] = client.execute_command(b"XRANGE", stream, start, "+", "COUNT", READ_CHUNK + 1)
        return entries

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
