"""What a novelty log is, wherever it lies: an append-only sequence of vectors with places in one total order.

A trace's novelty is a function of the log alone: one minus the largest similarity to the entries before its own that belong
to other traces, among the ``max_elements`` places before its own and younger than the TTL at its own time. An erased entry
leaves its place empty, so that the windows of the others stay what they were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.settings import NoveltySettings


@dataclass(frozen=True, slots=True)
class Window:
    """Which earlier entries count, and how much longer the log keeps them than a new entry needs.

    The slack is for traces whose worker died between appending and deciding: a redelivery finds its first place and still
    sees its whole window. A redelivery later than the slack is appended again, at a new place.
    """

    max_elements: int
    ttl_ms: int
    slack_elements: int
    slack_ms: int

    @classmethod
    def of(cls, settings: NoveltySettings) -> "Window":
        """The window that the settings describe."""
        return cls(settings.max_elements, int(settings.ttl_s * 1_000), settings.slack_elements, int(settings.slack_s * 1_000))

    @property
    def kept_elements(self) -> int:
        """How many entries a log or mirror must keep."""
        return self.max_elements + self.slack_elements


class Place(NamedTuple):
    """An entry's position in the log: places count up from 1, times (ms, the log's clock) never go back."""

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
    """A trace to admit. ``content`` is its 16-byte content digest, ``vector`` a float32 unit vector."""

    trace_id: str
    content: bytes
    vector: NDArray[np.float32]


class Cursor(NamedTuple):
    """How far a mirror has read: the log's epoch, and the newest entry read with its trace id (None: nothing yet)."""

    epoch: str
    place: Place | None
    trace_id: str


class Entry(NamedTuple):
    """One entry as read from the log: a trace's, or the note that an earlier entry was erased."""

    place: Place
    trace_id: str
    content: bytes
    vector: NDArray[np.float32]
    erases: Place | None = None
    """The place that this entry erases; then it has no trace id, content or vector of its own."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Entries newer than a cursor, oldest first."""

    epoch: str
    entries: Sequence[Entry]
    restart: bool
    """The cursor's entry is not in the log any more: whoever asked must forget what it read and start from these."""
    more: bool
    """The log holds newer entries than these."""


class NoveltyLog(Protocol):
    """The log. Admission is atomic and idempotent: a known trace gets its first place back."""

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit the candidates, in order, and read what is newer than the cursor, in one step.

        Returns:
            For each candidate its place, or None if its id was taken by other content; and the tail.

        Raises:
            ServiceUnavailable: the log cannot be reached; admitting again is safe.
        """
        ...
