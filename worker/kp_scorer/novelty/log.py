"""The novelty log: an append-only sequence of vectors with places in one total order, in Redis or in memory.

A trace's novelty is a function of the log alone: one minus the largest similarity to the entries before its own that belong
to other traces, and count if its own does, among the ``max_elements`` places before its own and younger than the TTL at its own
time. An erased entry leaves its place empty, so that the windows of other entries lose nothing else.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """Which earlier entries count, and how much longer the log keeps them than a new entry needs.

    The slack is for traces whose worker died between appending and deciding: within it a redelivery finds its first place
    and its whole window. A redelivery later than the slack is appended again, at a new place.
    """

    max_elements: int
    ttl_ms: int
    slack_elements: int
    slack_ms: int
    succeeded_confidence: float | None = None  # Only successes of at least this confidence count for all; None: all do.

    def __str__(self) -> str:
        return " ".join(str(value) for value in self if value is not None)

    @classmethod
    def parse(cls, text: str) -> "Window":
        """Read a window as ``str`` writes it, which is also how a log stores the one that its writers share."""
        numbers = text.split()
        return cls(*map(int, numbers[:4]), *map(float, numbers[4:]))

    def as_settings(self) -> dict[str, float | str]:
        """The settings of ``[novelty]`` that describe it, times in seconds."""
        return {
            "max_elements": self.max_elements,
            "ttl_s": self.ttl_ms / 1_000,
            "slack_elements": self.slack_elements,
            "against": "all" if self.succeeded_confidence is None else "succeeded",
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
    counts: bool = True  # Whether it counts for all later traces; if not, for those that do not count either, as all do.
    visible: bytes = b""  # The digest that copies share; empty: ``digest``.


class Cursor(NamedTuple):
    """How far a mirror has read the log of this epoch."""

    epoch: str
    place: Place | None  # Of the newest entry read, if any.
    trace_id: str  # Of that entry; empty if there is none, or if it was erased since.
    erasure: str  # Id of the newest erasure read; empty: none yet.


class Entry(NamedTuple):
    """One entry of the log."""

    place: Place
    trace_id: str
    digest: bytes
    vector: NDArray[np.float32]
    counts: bool = True
    visible: bytes = b""


class Erasure(NamedTuple):
    """The note that an entry was erased, for mirrors that have read it."""

    erasure_id: str
    place: Place


class Tail(NamedTuple):
    """Entries and erasures newer than a cursor, oldest first."""

    epoch: str
    entries: Sequence[Entry]
    erasures: Sequence[Erasure]
    restart: bool  # Whether the log is another one than the cursor's: the mirror must drop what it has read and start anew.
    more: bool


class NoveltyLog(Protocol):
    """The log. Admission is atomic and idempotent: a trace that was admitted before gets its first place back."""

    def append(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit the candidates, in order, and read what is newer than the cursor, in one step.

        It returns for each candidate its place, or None if another digest has its id; and the tail. SettingsError if the log is
        not empty, and was begun with another window.
        """


class MemoryLog:
    """A log with the semantics of the one in Redis, for scoring in one process."""

    def __init__(self, window: Window, clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._window = window
        self._clock_ms = clock_ms
        self._last = Place(0, 0)
        self._entries: deque[Entry] = deque(maxlen=window.kept_elements)
        self._records: dict[str, tuple[bytes, Place]] = {}

    def append(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit and read; see :class:`NoveltyLog`."""
        places = [self._admit(candidate) for candidate in candidates]
        newest_read = cursor.place.number if cursor and cursor.place else 0
        # Places are consecutive, so the newest ones are at the end; a slice of the whole deque would cost its length.
        count = min(len(self._entries), self._last.number - newest_read)
        newer = [self._entries[index] for index in range(-count, 0)]
        return places, Tail("", newer, (), restart=False, more=False)

    def _admit(self, candidate: Candidate) -> Place | None:
        digest, place = self._records.get(candidate.trace_id, (candidate.digest, None))
        if digest != candidate.digest:
            return None
        now = max(self._clock_ms(), self._last.time_ms)
        oldest = Place(now - self._window.slack_ms, self._last.number - self._window.slack_elements)
        if place and place.time_ms > oldest.time_ms and place.number > oldest.number:
            return place
        self._last = Place(now, self._last.number + 1)
        if len(self._entries) == self._entries.maxlen:
            dropped = self._entries[0]
            if self._records.get(dropped.trace_id) == (dropped.digest, dropped.place):
                del self._records[dropped.trace_id]
        self._records[candidate.trace_id] = (digest, self._last)
        self._entries.append(Entry(self._last, *candidate))
        return self._last
