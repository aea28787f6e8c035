"""The specification of a novelty log. It keeps every entry ever made, so that it always knows a window as a whole."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from kp_scorer.novelty import Candidate, Window

from tests.model.contents import vector_of
from tests.model.records import KEYS, RECORD_TTL_MS
from tests.support.word_embedder import WordEmbedder

if TYPE_CHECKING:
    from tests.model.reference import Reference

WINDOW: Final = Window(max_elements=6, ttl_ms=3_600_000, slack_elements=5, slack_ms=900_000, succeeded_confidence=0.5)
LARGEST_BATCH: Final = 3
LOG: Final = KEYS.of_log(WordEmbedder.space).log
HEAD: Final = KEYS.of_log(WordEmbedder.space).head
ERASED: Final = KEYS.of_log(WordEmbedder.space).erasures
_LIFE_MS: Final = WINDOW.ttl_ms + WINDOW.slack_ms


@dataclass
class LogEntry:
    """An entry of the log. It keeps its number when it is erased."""

    time_ms: int
    number: int
    trace_id: str
    digest: bytes
    counts: bool
    visible: bytes = b""  # The second digest of the entry; empty if it equals the first.
    is_erased: bool = False
    is_trimmed: bool = False

    @property
    def place(self) -> str:
        return f"{self.time_ms}-{self.number}"


class LogModel:
    """The novelty log as the specification describes it."""

    def __init__(self) -> None:
        self.epoch = ""
        self.time_ms = self.number = 0
        self.entries: list[LogEntry] = []
        self.erasures: list[str] = []

    def lose(self, key: str) -> None:
        if key == LOG:
            self.entries.clear()
        elif key == HEAD:
            self.epoch, self.time_ms, self.number = "", 0, 0
        elif key == ERASED:
            self.erasures.clear()

    def append(self, books: "Reference", epoch: str, candidates: Sequence[Candidate], replied: Sequence[str]) -> list[str]:
        """Return the places that candidates must get.

        Where the specification leaves that open, follow the places of ``replied``.
        """
        before = self.number
        places = [self._admit(books, epoch, candidate, place) for candidate, place in zip(candidates, replied, strict=True)]
        if self.number > before:
            self._trim()
        return places

    def _admit(self, books: "Reference", epoch: str, candidate: Candidate, replied: str) -> str:
        trace_id, digest, _, counts, visible = candidate
        record = books.record(trace_id)
        if (record.digest or record.state == "dead") and record.digest != digest:
            return ""
        if record.entry and record.epoch == epoch and self._keeps(record.entry, replied, books.now):
            return record.entry
        place = self._append(books, epoch, LogEntry(0, 0, trace_id, digest, counts, visible if visible != digest else b""))
        if record.state in ("decided", "dead"):
            # A trace that has ended keeps the place that its end rests on. Its worker uses the new place only for the
            # comparison.
            return place
        record.digest, record.epoch, record.entry = digest, epoch, place
        books.records[trace_id] = record
        if not record.state:
            books.expires_in(KEYS.record(trace_id), RECORD_TTL_MS)
        return place

    def _keeps(self, place: str, replied: str, now: int) -> bool:
        time_ms, _, number = place.partition("-")
        oldest = self.number - WINDOW.slack_elements
        is_within = int(number) > oldest and int(time_ms) > max(now, self.time_ms) - WINDOW.slack_ms
        # If a place is so near the end of the slack that this batch may push it out, the script may already treat it as gone.
        return is_within and (replied == place or int(number) > oldest + LARGEST_BATCH)

    def _append(self, books: "Reference", epoch: str, entry: LogEntry) -> str:
        self.epoch, self.number = epoch, self.number + 1
        self.time_ms = max(books.now, self.time_ms)
        self.entries.append(replace(entry, time_ms=self.time_ms, number=self.number))
        books.expires_in(LOG, _LIFE_MS)
        books.expires_in(HEAD, _LIFE_MS + 60_000)
        return self.entries[-1].place

    def _trim(self) -> None:
        present = self.present()
        for index, entry in enumerate(present):
            is_beyond = index < len(present) - WINDOW.kept_elements
            entry.is_trimmed = is_beyond or entry.time_ms < self.time_ms - _LIFE_MS

    def present(self) -> list[LogEntry]:
        return [entry for entry in self.entries if not (entry.is_erased or entry.is_trimmed)]

    def erase(self, entries: Sequence[LogEntry], books: "Reference") -> int:
        """Erase these entries, all of which exist."""
        for entry in entries:
            entry.is_erased = True
            self.erasures.append(entry.place)
            books.expires_in(ERASED, _LIFE_MS)
        del self.erasures[: -WINDOW.kept_elements]
        return len(entries)

    def at(self, place: str) -> LogEntry | None:
        return next((entry for entry in self.entries if entry.place == place), None)

    def window(self, place: str) -> list[LogEntry]:
        """Return the entries that a trace at a place is compared with, erased or not."""
        own = self.at(place)
        assert own, place
        return [
            entry
            for entry in self.entries
            if own.number - WINDOW.max_elements <= entry.number < own.number and entry.time_ms > own.time_ms - WINDOW.ttl_ms
        ]

    def is_whole(self, place: str) -> bool:
        """Return whether the log holds all of a place's window that was not erased."""
        return not any(entry.is_trimmed and not entry.is_erased for entry in self.window(place))

    def similarity(self, place: str) -> float | None:
        """Return the largest similarity to the comparable entries in the window of a place; None if there are none."""
        own = self.at(place)
        assert own, place
        counting = [entry for entry in self.window(place) if (entry.counts or not own.counts) and not entry.is_erased]
        others = [entry for entry in counting if entry.trace_id != own.trace_id]
        if not others:
            return None
        if any((entry.visible or entry.digest) == (own.visible or own.digest) for entry in others):
            return 1.0
        return max(float(vector_of(entry.digest) @ vector_of(own.digest)) for entry in others)
