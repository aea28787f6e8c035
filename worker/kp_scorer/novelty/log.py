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

    def __str__(self) -> str:
        return f"{self.max_elements} {self.ttl_ms} {self.slack_elements} {self.slack_ms}"

    @classmethod
    def parse(cls, text: str) -> "Window":
        """Read a window as ``str`` writes it, which is also how a log notes the one that its writers share."""
        return cls(*map(int, text.split()))

    def as_settings(self) -> dict[str, float]:
        """The settings of ``[novelty]`` that describe it, times in seconds."""
        return {
            "max_elements": self.max_elements,
            "ttl_s": self.ttl_ms / 1_000,
            "slack_elements": self.slack_elements,
            "slack_s": self.slack_ms / 1_000,
        }

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
    """How far a mirror has read."""

    epoch: str
    """The log's."""
    place: Place | None
    """Of the newest entry read; None: none yet."""
    trace_id: str
    """Of that entry; empty if there is none, or if it was erased since."""
    erasure: str
    """Id of the newest erasure read; empty: none yet."""


class Entry(NamedTuple):
    """One entry as read from the log."""

    place: Place
    trace_id: str
    digest: bytes
    vector: NDArray[np.float32]


class Erasure(NamedTuple):
    """The note that an entry was erased, for those who have read it."""

    erasure_id: str
    place: Place


@dataclass(frozen=True, slots=True)
class Tail:
    """Entries newer than a cursor, oldest first."""

    epoch: str
    entries: Sequence[Entry]
    erasures: Sequence[Erasure]
    """What was erased since, oldest first."""
    restart: bool
    """The log is not the one that the cursor was read from: the mirror must drop what it has read and start afresh."""
    more: bool
    """There is more to read than this."""


class NoveltyLog(Protocol):
    """The log. Admission is atomic and idempotent: a known trace gets its first place back."""

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit the candidates, in order, and read what is newer than the cursor, in one step.

        Returns:
            For each candidate its place, or None if its id was taken by another digest; and the tail.

        Raises:
            SettingsError: the log is not empty, and was begun with another window.
            ServiceUnavailable: the log cannot be reached; admitting again is safe.
        """
        ...
