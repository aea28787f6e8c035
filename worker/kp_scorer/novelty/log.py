"""The interface of the novelty log, an append-only sequence of vectors in one total order, and a log in memory.

The novelty of a trace is a function of the log alone: one minus the largest similarity to an earlier entry of another trace in
its window. The window is the ``max_elements`` places before its own, as far as they are younger than the TTL at its own time.
An entry that is not comparable counts only for traces that are not comparable either. An erased entry leaves its place empty,
so no window shifts.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Window(NamedTuple):
    """The range of earlier entries that a trace is compared with, and the slack: the entries that the log keeps beyond it.

    The slack serves traces whose worker died between appending and deciding: within it, a redelivery finds its first place and
    its whole window. A later redelivery is appended again, at a new place.
    """

    max_elements: int
    ttl_ms: int
    slack_elements: int
    slack_ms: int
    succeeded_confidence: float | None = None  # Only successes of at least this confidence are comparable; None: all are.

    def __str__(self) -> str:
        return " ".join(str(value) for value in self if value is not None)

    @classmethod
    def parse(cls, text: str) -> "Window":
        """Parse a window as ``str`` writes it. A log stores the window of its writers in this form."""
        numbers = text.split()
        return cls(*map(int, numbers[:4]), *map(float, numbers[4:]))

    def as_settings(self) -> dict[str, float | str]:
        """Return the settings of ``[novelty]`` that describe this window, with times in seconds."""
        return {
            "max_elements": self.max_elements,
            "ttl_s": self.ttl_ms / 1_000,
            "slack_elements": self.slack_elements,
            "against": "all" if self.succeeded_confidence is None else "succeeded",
        }

    @property
    def kept_elements(self) -> int:
        """The number of entries that a log or mirror must keep."""
        return self.max_elements + self.slack_elements


class Place(NamedTuple):
    """The position of an entry in the log. Numbers count up from 1; times, in ms by the log's clock, never decrease."""

    time_ms: int
    number: int

    def __str__(self) -> str:
        return f"{self.time_ms}-{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Place":
        """Parse a place as ``str`` writes it, which is also the id of the entry in the Redis Stream."""
        time_ms, _, number = text.partition("-")
        return cls(int(time_ms), int(number))


class Candidate(NamedTuple):
    """A trace to admit. ``digest`` has 16 bytes, ``vector`` is a float32 unit vector."""

    trace_id: str
    digest: bytes
    vector: NDArray[np.float32]
    # If True, all later traces are compared with this one; if False, only those that are not comparable either.
    is_comparable: bool = True
    visible: bytes = b""  # The digest that copies share; empty if it is ``digest``.


class Cursor(NamedTuple):
    """The position up to which a mirror has read the log of an epoch."""

    epoch: str
    place: Place | None  # The place of the newest entry that was read, if any.
    trace_id: str  # The trace of that entry; empty if there is none, or if it was erased since.
    erasure: str  # The id of the newest erasure that was read; empty if there is none.


class Entry(NamedTuple):
    """One entry of the log."""

    place: Place
    trace_id: str
    digest: bytes
    vector: NDArray[np.float32]
    is_comparable: bool = True
    visible: bytes = b""


class Erasure(NamedTuple):
    """The note that an entry was erased, for mirrors that have read the entry."""

    erasure_id: str
    place: Place


class Tail(NamedTuple):
    """Entries and erasures newer than a cursor, oldest first."""

    epoch: str
    entries: Sequence[Entry]
    erasures: Sequence[Erasure]
    restart: bool  # True if the cursor belongs to another log, so that the mirror must drop everything and start again.
    more: bool  # True if the log has entries or erasures that are newer still.


class NoveltyLog(Protocol):
    """The log. Admission is atomic and idempotent: a trace that was admitted before gets its first place back."""

    def append(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit the candidates, in order, and read everything newer than the cursor, in one step.

        Returns the place of each candidate, None if its id has another digest; and the tail. Raises SettingsError if the log is
        not empty and has another window.
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
        """Admit candidates and read on; see :class:`NoveltyLog`."""
        places = [self._admit(candidate) for candidate in candidates]
        newest_read = cursor.place.number if cursor and cursor.place else 0
        # Places are consecutive, so the newest entries are the last ones. Index them, because a deque has no slices.
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
