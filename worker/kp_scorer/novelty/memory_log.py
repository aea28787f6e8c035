"""The novelty log in memory: for scoring offline, in one process, without Redis."""

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence

from kp_scorer.novelty.log import Candidate, Cursor, Entry, Place, Tail, Window


def _wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryLog:
    """A log with the semantics of the one in Redis. ``clock_ms`` takes the place of Redis' clock."""

    def __init__(self, window: Window, clock_ms: Callable[[], int] = _wall_clock_ms) -> None:
        """Start an empty log."""
        self._window = window
        self._clock_ms = clock_ms
        self._epoch = uuid.uuid4().hex
        self._last = Place(0, 0)
        self._entries: deque[Entry] = deque(maxlen=window.kept_elements)
        self._records: dict[str, tuple[bytes, Place]] = {}

    def exchange(self, candidates: Sequence[Candidate], cursor: Cursor | None) -> tuple[list[Place | None], Tail]:
        """Admit and read; see :class:`~kp_scorer.novelty.log.NoveltyLog`."""
        places = [self._admit(candidate) for candidate in candidates]
        if cursor is not None and cursor.epoch != self._epoch:
            return places, Tail(self._epoch, (), (), restart=True, more=True)
        seen = cursor.place.number if cursor and cursor.place else 0
        # Places are consecutive, so the newest ones are at the end; a slice of the whole deque would cost its length.
        count = min(len(self._entries), self._last.number - seen)
        newer = [self._entries[index] for index in range(-count, 0)]
        return places, Tail(self._epoch, newer, (), restart=False, more=False)

    def _admit(self, candidate: Candidate) -> Place | None:
        digest, place = self._records.get(candidate.trace_id, (candidate.digest, None))
        if digest != candidate.digest:
            return None
        now = max(self._clock_ms(), self._last.time_ms)
        oldest = Place(now - self._window.slack_ms, self._last.number - self._window.slack_elements)
        if place and place.time_ms > oldest.time_ms and place.number > oldest.number:
            return place
        self._last = Place(now, self._last.number + 1)
        self._records[candidate.trace_id] = (digest, self._last)
        self._entries.append(Entry(self._last, *candidate))
        return self._last
