"""Defines the facts that decisions leave for later decisions in their domains, in one order for all workers."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kp_scorer.novelty.log import Place

BEGINNING: Final = Place(0, 0)
TICKS: Final = 2**20  # A place as a number counts this many ticks per millisecond.

# What a fact says besides its trace, its domain and its vector; see Fact. Places are numbers.
_NAMES: Final = ("as_of", "cover", "adds", "kept_ttl_ms", "mates", "is_kept")
_FIELDS: Final = list(zip(_NAMES, ("<i8", "<f8", "<f8", "<i8", "<i4", "?"), strict=True))
# A unit vector is stored as integers. Their rounding moves a similarity by some 1e-4, and unlike float16 they are quickly read.
_STEPS: Final = np.float32(2**15 - 1)

Vectors = NDArray[np.float32]
Rows = NDArray[np.void]
Entry = Sequence[Any]
"""An entry of the log as Redis sends it: its place, and a list of the names and values that ``lua/facts.lua`` defines."""


class Fact(NamedTuple):
    """The record that a decision leaves for later decisions in its domain."""

    trace_id: str
    domain: str
    as_of: Place  # The newest fact that the decision rests on, besides its mates.
    cover: float  # 0..1, when it was decided.
    adds: float  # 0 if the trace does not meet the requirement, or something else keeps it from being accepted.
    kept_ttl_ms: int  # The lifetime of kept traces when it was decided.
    mates: int  # The number of the domain's facts that the same step stored right before this one.
    is_kept: bool
    vector: Vectors  # Of shape (dimensions,)

    def packed(self) -> bytes:
        """Return the fact as it is stored, without its trace id and its domain."""
        values = (number_of(self.as_of), *self[3:-1], _in_steps(self.vector))
        return np.array(values, _stored_type(len(self.vector))).tobytes()


class StoredFact(NamedTuple):
    """An entry of the log of facts: a fact, or a note about the fact at a place; neither if it is damaged."""

    place: Place
    fact: Fact | None = None
    is_late: bool = False  # True if an earlier fact is stored again, because its trace is kept from here on.
    dropped: Place | None = None  # The place of the fact whose trace is no longer kept.
    erased: Place | None = None  # The place of the fact that was erased.


class Entries:
    """Entries of the log, oldest first, with the facts in the rows of one array: each worker reads the facts of all workers."""

    def __init__(self, entries: Sequence[Entry], dimensions: int | None = None) -> None:
        """Parse entries; without ``dimensions``, facts have those that most of them have."""
        self._entries = entries
        packed = [fields[5] if len(fields) > 5 else b"" for _, fields in entries]
        if dimensions is None:
            [(length, _)] = Counter(filter(None, map(len, packed))).most_common(1) or [(0, 0)]
            dimensions = max(0, length - _stored_type(0).itemsize) // 2
        # Anyone with write access to Redis can store garbage.
        blank = bytes(_stored_type(dimensions).itemsize)
        joined = b"".join(each if len(each) == len(blank) else blank for each in packed)
        stored = np.frombuffer(joined, _stored_type(dimensions))
        is_intact = (stored["kept_ttl_ms"] > 0) & np.isfinite(stored["cover"]) & np.isfinite(stored["adds"])
        self.rows: Rows = np.empty(len(entries), row_type(dimensions))
        for name in _NAMES:
            self.rows[name] = stored[name]
        np.multiply(stored["vector"], 1 / _STEPS, out=self.rows["vector"])
        places = b" ".join(place for place, _ in entries).replace(b"-", b" ")
        self.rows["at"] = np.fromstring(places, np.int64, sep=" ").reshape(-1, 2) @ (TICKS, 1)
        self.notes = {index: _note(place, fields) for index, (place, fields) in enumerate(entries) if len(fields) != 6}
        """The notes by index. A late fact has one, too, which lacks the fact itself."""
        for index, note in self.notes.items():
            self.rows["is_kept"][index] |= note.is_late
        self.rows["is_kept"] &= is_intact
        self.domains = [
            fields[3].decode(errors="replace") if has_fact else ""
            for has_fact, (_, fields) in zip(is_intact.tolist(), entries, strict=True)
        ]
        """The domain of each fact; empty for an entry without a fact, or with a damaged one."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[StoredFact]:
        for index, (place, _) in enumerate(self._entries):
            note = self.notes.get(index) or StoredFact(Place.parse(place.decode()))
            yield note._replace(fact=self._fact(index))

    def trace_id(self, index: int) -> str:
        """Return the id of the trace of an entry."""
        trace_id: bytes = self._entries[index][1][1]
        return trace_id.decode(errors="replace")

    def _fact(self, index: int) -> Fact | None:
        if not (domain := self.domains[index]):
            return None
        _, as_of, *values, _ = self.rows[index].item()
        named = self.trace_id(index), domain, Place(*divmod(as_of, TICKS))
        return Fact._make((*named, *values, self.rows["vector"][index]))


class Facts(NamedTuple):
    """Entries newer than a place, oldest first."""

    entries: Sequence[Entry]
    kept_entries: Sequence[Entry] = ()  # Those about all kept traces; only for a reading from the beginning.
    restart: bool = False  # True if the log no longer holds the place, so that all must be read anew.
    more: bool = False  # True if newer ones are left.


class FactLog(Protocol):
    """The log of facts. Committing a decision appends its fact."""

    def read(self, after: Place | None) -> Facts:
        """Read the facts that are newer than a place; without one, read from the beginning."""


class MemoryFacts:
    """A log of facts in this process, which keeps them until they are read."""

    def __init__(self, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._clock_ms = clock_ms
        self._last = BEGINNING
        self._unread: list[Entry] = []

    def append(self, trace_id: str, domain: str, fact: bytes) -> None:
        """Store a packed fact."""
        self._last = Place(max(self._clock_ms(), self._last.time_ms), self._last.number + 1)
        self._unread.append((str(self._last).encode(), [b"i", trace_id.encode(), b"d", domain.encode(), b"f", fact]))

    def read(self, _: Place | None) -> Facts:
        """Return the facts that were stored since the last call."""
        unread, self._unread = self._unread, []
        return Facts(unread)


def number_of(place: Place) -> int:
    """Return a place as a number, in the same order and in proportion to time."""
    # Redis never assigns a million places in one millisecond, so they do not overlap.
    return place.time_ms * TICKS + place.number


def rounded(vectors: Vectors) -> Vectors:
    """Return unit vectors as they are read once they have been stored."""
    read: Vectors = _in_steps(vectors) * (1 / _STEPS)
    return read


def _in_steps(vectors: Vectors) -> NDArray[np.int16]:
    steps: NDArray[np.int16] = np.rint(vectors * _STEPS).astype("<i2")
    return steps


@cache
def row_type(dimensions: int) -> np.dtype[np.void]:
    """Return the type of a row with a fact and its place, as workers calculate with it."""
    return np.dtype([("at", "<i8"), *_FIELDS, ("vector", "<f4", (dimensions,))], align=True)


@cache
def _stored_type(dimensions: int) -> np.dtype[np.void]:
    return np.dtype([*_FIELDS, ("vector", "<i2", (dimensions,))])


def _note(place: bytes, fields: Sequence[bytes]) -> StoredFact:
    stored = StoredFact(Place.parse(place.decode()))
    with suppress(ValueError):
        match fields:
            case [b"i", _, b"d", _, b"f", _, b"r", _]:
                return stored._replace(is_late=True)
            case [b"i", _, b"r", dropped]:
                return stored._replace(dropped=Place.parse(dropped.decode()))
            case [b"e", erased]:
                return stored._replace(erased=Place.parse(erased.decode()))
    return stored
