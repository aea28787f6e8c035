"""The specification of the facts that decisions leave for the gates of all workers."""

from typing import TYPE_CHECKING, Final

from kp_scorer.gate import GateBounds, GatePolicy
from kp_scorer.store.keys import FactKeys, KeptFactKeys
from kp_scorer.store.records import Verdict

from tests.model.records import KEYS
from tests.support.word_embedder import WordEmbedder

if TYPE_CHECKING:
    from tests.model.reference import Reference

BOUNDS: Final = GateBounds(kept_elements=6, kept_ttl_ms=50 * 86_400_000, most_facts=12, most_runs=4)
POLICY: Final = GatePolicy(0.4)
FACTS: Final = FactKeys(KEYS.of_facts(WordEmbedder.space)).log
KEPT_FACTS: Final = KeptFactKeys(KEYS.of_facts(WordEmbedder.space)).log

Fields = tuple[str, bytes, bytes]
ERASED: Final[Fields] = "", b"", b""
"""The note that a fact was erased, of which the specification leaves open which."""


class FactsModel:
    """The facts as they should be: trace id, text and vector of each, oldest first."""

    def __init__(self) -> None:
        self.stored: list[Fields] = []
        self.kept_facts: list[Fields] = []
        self.has_kept = False

    def lose(self, key: str) -> None:
        if key == FACTS:
            self.stored.clear()
        elif key == KEPT_FACTS:
            self.kept_facts.clear()
            self.has_kept = False

    def append(self, books: "Reference", verdict: Verdict) -> None:
        fields = verdict.trace_id, verdict.fact, verdict.vector
        self._store(books, fields)
        if verdict.is_kept:
            self.kept_facts = [*self.kept_facts, fields][-BOUNDS.kept_elements :]
            self.has_kept = True
        if self.has_kept:
            books.expires_in(KEPT_FACTS, BOUNDS.kept_ttl_ms)

    def erase(self, books: "Reference", trace_id: str) -> None:
        for entries in (self.stored, self.kept_facts):
            erased = [entry for entry in entries if entry[0] == trace_id]
            entries[:] = [entry for entry in entries if entry not in erased]
            for _ in erased:
                self._store(books, ERASED)

    def _store(self, books: "Reference", fields: Fields) -> None:
        self.stored = [*self.stored, fields][-BOUNDS.most_facts :]
        books.expires_in(FACTS, BOUNDS.kept_ttl_ms)
