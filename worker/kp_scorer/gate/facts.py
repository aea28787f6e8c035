"""Defines the facts that decisions leave for later decisions in their domains, in one order for all workers."""

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kp_scorer.novelty.log import Place

DAMAGES: Final = (ValueError, TypeError, AttributeError)  # The errors that parsing a damaged fact may raise.
BEGINNING: Final = Place(0, 0)
VECTOR: Final = np.dtype("<f2")
"""The type of a stored vector. Its rounding moves a similarity by some 1e-4."""

Vectors = NDArray[np.float32]


class Fact(NamedTuple):
    """The record that a decision leaves for later decisions in its domain."""

    trace_id: str
    domain: str
    as_of: Place  # The newest fact that the decision rests on, besides its mates.
    mates: int  # The number of the domain's facts that the same step stored right before this one.
    cover: float  # 0..1, when it was decided.
    adds: float  # 0 if the trace does not meet the requirement, or something else keeps it from being accepted.
    is_kept: bool
    kept_ttl_ms: int  # The lifetime of kept traces when it was decided.
    vector: Vectors  # Of shape (dimensions,)

    def packed(self) -> tuple[bytes, bytes]:
        """Return the fact as it is stored: all fields but the vector as JSON, and the vector in float16."""
        text = json.dumps([self.trace_id, self.domain, str(self.as_of), *self[3:-1]])
        return text.encode(), self.vector.astype(VECTOR).tobytes()


class StoredFact(NamedTuple):
    """An entry of the log of facts: a fact, or a note about the fact at a place; neither if it is damaged."""

    place: Place
    fact: Fact | None = None
    is_late: bool = False  # True if an earlier fact is stored again, because its trace is kept from here on.
    dropped: Place | None = None  # The place of the fact whose trace is no longer kept.
    erased: Place | None = None  # The place of the fact that was erased.


class Facts(NamedTuple):
    """Facts newer than a place, oldest first."""

    facts: Sequence[StoredFact]
    kept_facts: Sequence[StoredFact] = ()  # The facts of all kept traces; only for a reading from the beginning.
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
        self._unread: list[StoredFact] = []

    def append(self, text: bytes, vector: bytes) -> None:
        """Store a packed fact; raise one of :data:`DAMAGES` if it is damaged."""
        self._last = Place(max(self._clock_ms(), self._last.time_ms), self._last.number + 1)
        (fact,) = parse_facts([text], vector)
        self._unread.append(StoredFact(self._last, fact))

    def read(self, _: Place | None) -> Facts:
        """Return the facts that were stored since the last call."""
        unread, self._unread = self._unread, []
        return Facts(unread)


def parse_place(text: str) -> Place:
    """Parse a place; raise ValueError if it is damaged, or so late that its number would not fit into 64 bits."""
    place = Place.parse(text)
    if not (0 <= place.time_ms < 2**42 and 0 <= place.number < 2**40):
        raise ValueError("expected a place that fits into 64 bits")
    return place


def parse_facts(texts: Sequence[bytes], vectors: bytes) -> list[Fact]:
    """Parse facts from their texts and their joined vectors; raise one of :data:`DAMAGES` if any is damaged."""
    parsed = json.loads(b"[%s]" % b",".join(texts))
    matrix = np.frombuffer(vectors, VECTOR).reshape(len(texts), -1 if texts else 0).astype(np.float32)
    if len(parsed) != len(texts) or not np.isfinite(matrix).all():
        raise ValueError("expected a fact in each text, and finite vectors")
    place_of, facts = cache(parse_place), list[Fact]()
    for row, vector in zip(parsed, matrix, strict=True):
        trace_id, domain, as_of, mates, cover, adds, is_kept, kept_ttl_ms = row
        if not math.isfinite(mates + cover + adds + kept_ttl_ms) or kept_ttl_ms <= 0:
            raise ValueError("expected finite numbers, and a lifetime")
        known = str(trace_id), str(domain), place_of(as_of), mates, cover, adds, is_kept is True, kept_ttl_ms
        facts.append(Fact(*known, vector))
    return facts
