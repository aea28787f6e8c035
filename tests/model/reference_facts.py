"""The specification of the facts that decisions leave for the gates of all workers."""

from typing import TYPE_CHECKING, Final, NamedTuple

from kp_scorer.gate import GateBounds, GatePolicy
from kp_scorer.store.keys import FactKeys, KeptFactKeys
from kp_scorer.store.records import Change, Verdict

from tests.model.records import KEYS
from tests.support.word_embedder import WordEmbedder

if TYPE_CHECKING:
    from tests.model.reference import Reference

BOUNDS: Final = GateBounds(kept_elements=6, kept_ttl_ms=50 * 86_400_000, most_facts=12, most_runs=4)
POLICY: Final = GatePolicy(0.4)
FACTS: Final = FactKeys(KEYS.of_facts(WordEmbedder.space)).log
KEPT_FACTS: Final = KeptFactKeys(KEYS.of_facts(WordEmbedder.space)).log


class Entry(NamedTuple):
    """A fact, or a note about one; the specification leaves it open which of the two it is."""

    trace_id: str
    domain: str = ""
    fact: bytes = b""
    is_note: bool = False
    """True also for a fact that is stored a second time, because its trace is kept from then on."""


ERASED: Final = Entry("", is_note=True)


class FactsModel:
    """The facts that Redis should hold, oldest first, each with a serial number."""

    def __init__(self) -> None:
        self.stored: list[tuple[int, Entry]] = []
        self.kept_facts: list[tuple[int, Entry]] = []
        self.has_kept = False
        self.serials = 0

    def lose(self, key: str) -> None:
        if key == FACTS:
            self.stored.clear()
        elif key == KEPT_FACTS:
            self.kept_facts.clear()
            self.has_kept = False

    def append(self, books: "Reference", verdict: Verdict) -> str:
        """Append the fact of a decision, and return its serial number."""
        return self._append(books, Entry(verdict.trace_id, verdict.domain, verdict.fact), is_of_kept=verdict.is_kept)

    def revise(self, books: "Reference", serial: str, change: Change) -> str:
        """Note the change to a fact's trace if the fact still exists; return the serial number of the trace's newest fact."""
        there = dict((*self.kept_facts, *(self.stored if change == "kept" else ())))
        entry = there.get(int(serial or 0))
        if entry and change == "kept":
            return self._append(books, entry._replace(is_note=True), is_of_kept=True)
        if entry and change == "dropped":
            self._append(books, Entry(entry.trace_id, is_note=True), is_of_kept=True)
        return serial

    def _append(self, books: "Reference", entry: Entry, *, is_of_kept: bool) -> str:
        self._store(books, entry)
        if is_of_kept:
            self.kept_facts = [*self.kept_facts, (self.serials, entry)][-BOUNDS.kept_elements :]
            self.has_kept = True
        if self.has_kept:
            books.expires_in(KEPT_FACTS, BOUNDS.kept_ttl_ms)
        return str(self.serials)

    def erase(self, books: "Reference", trace_id: str) -> None:
        for entries in (self.stored, self.kept_facts):
            erased = [each for each in entries if each[1].trace_id == trace_id]
            entries[:] = [each for each in entries if each not in erased]
            for _ in erased:
                self._store(books, ERASED)

    def _store(self, books: "Reference", entry: Entry) -> None:
        self.serials += 1
        self.stored = [*self.stored, (self.serials, entry)][-BOUNDS.most_facts :]
        books.expires_in(FACTS, BOUNDS.kept_ttl_ms)
