"""The novelty log's interface, in Redis or in memory: an append-only sequence of vectors with places in one total order.

A trace's novelty is a function of the log alone: one minus the largest similarity to the entries before its own that belong
to other traces, among the ``max_elements`` places before its own and younger than the TTL at its own time. An erased entry
leaves its place empty, so that the windows of other entries lose nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Window:
    """Which earlier entries count, and how much longer the log keeps them than a new entry needs.

    The slack is for traces whose worker died between appending and deciding: within it a redelivery finds its first place
    and its whole window. A redelivery later than the slack is appended again, at a new place.
    """

    max_elements: int
    ttl_ms: int
    slack_elements: int
    slack_ms: int

    @property
    def kept_elements(self) -> int:
        """How many entries a log or mirror must keep."""
        return self.max_elements + self.slack_elements


class Place(NamedTuple):
    """An entry's position in the log: numbers count up from 1, times (ms, the log's clock) never go back."""

    time_ms: int
    number: int

    def __str__(self) -> str:
        return f"{self.time_ms}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Read a place as ``str`` writes it, which is also the id of the entry in the Redis stream."""
        time_ms, _, number = text.partition("-")
        return cls(int(time_ms), int(number))


class Candidate(NamedTuple):
    """A trace to admit. ``digest`` has 16 bytes, ``vector`` is a float32 unit vector."""

    trace_id: str
    digest: bytes
    vector: NDArray[np.float32]


class Cursor(NamedTuple):
    """How far a mirror has read: the log's epoch, the newest place read (None: nothing yet) and its trace id."""

    epoch: str
    place: Place | None
    trace_id: str


class Entry(NamedTuple):
    """One entry as read from the log: a trace's, or the note that an earlier entry was erased."""

    place: Place
    trace_id: str
    digest: bytes
    vector: NDArray[np.float32]
    erases: Place | None = None
    """The place that this entry erases; its own trace id, digest and vector are then empty."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Entries newer than a cursor, oldest first."""

    epoch: str
    entries: Sequence[Entry]
    restart: bool
    """The cursor's entry is no longer in the log: the mirror must drop what it has read and start without a cursor."""
    more: bool
    """The log holds newer entries than these."""


class NoveltyLog(Protocol):
    """The log. Admission is atomic and idempotent: a known trace gets its first place back."""

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit the candidates, in order, and read what is newer than the cursor, in one step.

        Returns:
            For each candidate its place, or None if its id was taken by another digest; and the tail.

        Raises:
            ServiceUnavailable: the log cannot be reached; admitting again is safe.
        """
        ...
