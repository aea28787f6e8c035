"""A process's mirror of the log's tail, and the cache that places traces in the log and compares them by the mirror."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.novelty.log import Candidate, Cursor, Entry, NoveltyLog, Place, Tail, Window

_SCAN_ROWS: Final = 8_192  # The rows that are compared at once: the similarities of a batch to these take some megabytes.


class Nearest(NamedTuple):
    """The most similar entry of a window. It ``is_duplicate`` if it is a copy, by the digest that copies share."""

    trace_id: str
    similarity: float
    is_duplicate: bool


class Placement(NamedTuple):
    """The place of a candidate in the log, and its nearest earlier entry; None if its window has none."""

    place: Place
    nearest: Nearest | None


class Mirror:
    """The newest ``window.kept_elements`` entries as arrays. One thread owns it.

    Rows are contiguous and in the order of the log, so finding a window takes some binary searches, and scanning it is one
    matrix product. The arrays have room for more rows than are kept; when they are full, the kept rows move to the front.
    """

    def __init__(self, window: Window, dimensions: int) -> None:
        self._window = window
        capacity = window.kept_elements + max(1_024, window.kept_elements // 8)
        try:
            self._vectors = np.empty((capacity, dimensions), np.float32)
        except (MemoryError, ValueError):
            raise SettingsError(f"novelty.max_elements: there is no memory for {capacity} vectors") from None
        self._times = np.empty(capacity, np.int64)
        self._numbers = np.empty(capacity, np.int64)
        self._digests = np.empty(capacity, np.uint64)
        self._bounds = np.empty((2, capacity), np.float32)
        """Upper bounds of a row's similarity to traces that are not comparable, and to those that are; -inf leaves it out."""
        self._trace_ids: list[str] = []
        self.cursor: Cursor | None = None  # The position up to which the log has been read; None before the first read.

    def __len__(self) -> int:
        return len(self._trace_ids)

    def apply(self, tail: Tail) -> None:
        """Append the entries of a tail and blank those that it erases; drop everything if it demands a restart."""
        if tail.restart:
            self._trace_ids.clear()
            self.cursor = None
            return
        cursor = self.cursor or Cursor(tail.epoch, None, "", "")
        for entry in tail.entries:
            self._append(entry)
            cursor = cursor._replace(place=entry.place, trace_id=entry.trace_id)
        for erasure in tail.erasures:
            self._erase(erasure.place)
            cursor = cursor._replace(erasure=erasure.erasure_id)
            if erasure.place == cursor.place:
                cursor = cursor._replace(trace_id="")
        self.cursor = cursor

    def nearest(self, places: Sequence[Place]) -> list[Nearest | None]:
        """Return for each place the most similar entry of its window that it is compared with; None if there is none.

        Entries of the same trace do not count. A copy is always the nearest, with a similarity of exactly 1, although two
        embeddings of one text may differ in the last bit. Raises KeyError if a place has no entry, because the log was emptied
        meanwhile.
        """
        owns = [self._row(place) for place in places]
        windows = [self._rows(place) for place in places]
        best = self._scan(owns, windows)
        return [self._duplicate(own, rows) or nearest for own, rows, nearest in zip(owns, windows, best, strict=True)]

    def vectors(self, places: Sequence[Place]) -> NDArray[np.float32]:
        """Return the vectors at these places, of shape (places, dimensions); raise KeyError as :meth:`nearest` does."""
        return self._vectors[[self._row(place) for place in places]]

    def similarity(self, vector: NDArray[np.float32], time_ms: int) -> float | None:
        """Return the largest similarity that a vector would have at this time to a comparable entry; None if there is none."""
        rows = self._rows(Place(time_ms, int(self._numbers[len(self) - 1]) + 1)) if len(self) else range(0)
        similarities = np.minimum(self._vectors[rows.start : rows.stop] @ vector, self._bounds[1, rows.start : rows.stop])
        largest = float(similarities.max(initial=-np.inf))
        return largest if largest != -np.inf else None

    def _append(self, entry: Entry) -> None:
        if len(self) == len(self._numbers):
            self._drop_oldest(len(self) - self._window.kept_elements + 1)
        row = len(self)
        self._times[row], self._numbers[row] = entry.place
        # 8 bytes distinguish the entries of a window, and numpy compares them in one operation.
        self._digests[row] = int.from_bytes((entry.visible or entry.digest)[:8], "little")
        self._bounds[:, row] = np.inf, np.inf if entry.is_comparable else -np.inf
        self._trace_ids.append(entry.trace_id)
        if entry.trace_id and entry.vector.shape == self._vectors[row].shape:
            self._vectors[row] = entry.vector
        else:
            # The entry is damaged.
            self._erase(entry.place)

    def _erase(self, place: Place) -> None:
        """Blank a row and keep its number, so that windows lose nothing else."""
        try:
            row = self._row(place)
        except KeyError:
            return
        self._vectors[row] = 0.0
        self._digests[row] = 0
        self._bounds[:, row] = -np.inf
        self._trace_ids[row] = ""

    def _row(self, place: Place) -> int:
        row = int(np.searchsorted(self._numbers[: len(self)], place.number, "left"))
        # The time must match too: a log that was emptied counts from 1 again, so another entry may have the number.
        if row == len(self) or (self._times[row], self._numbers[row]) != place:
            raise KeyError(place)
        return row

    def _rows(self, place: Place) -> range:
        """Return the rows of the window before ``place``: by number, and younger than the TTL at its time."""
        numbers, times = self._numbers[: len(self)], self._times[: len(self)]
        by_number = int(np.searchsorted(numbers, place.number - self._window.max_elements, "left"))
        by_age = int(np.searchsorted(times, place.time_ms - self._window.ttl_ms, "right"))
        return range(max(by_number, by_age), int(np.searchsorted(numbers, place.number, "left")))

    def _scan(self, owns: Sequence[int], windows: Sequence[range]) -> list[Nearest | None]:
        best: list[Nearest | None] = [None] * len(owns)
        occupied = [rows for rows in windows if rows]
        if not occupied:
            return best
        vectors = self._vectors[list(owns)]
        first, end = min(rows.start for rows in occupied), max(rows.stop for rows in occupied)
        for start in range(first, end, _SCAN_ROWS):
            stop = min(start + _SCAN_ROWS, end)
            similarities = vectors @ self._vectors[start:stop].T
            for index, rows in enumerate(windows):
                low, high = max(rows.start, start), min(rows.stop, stop)
                if low < high:
                    nearest = self._best(owns[index], low, similarities[index, low - start : high - start])
                    best[index] = max(best[index], nearest, key=lambda each: each.similarity if each else -2.0)
        return best

    def _best(self, own: int, first_row: int, similarities: NDArray[np.float32]) -> Nearest | None:
        bounds = self._bounds_for(own)[first_row : first_row + len(similarities)]
        np.minimum(similarities, bounds, out=similarities)
        while (similarity := similarities[offset := int(similarities.argmax())]) != -np.inf:
            trace_id = self._trace_ids[first_row + offset]
            if trace_id != self._trace_ids[own]:
                return Nearest(trace_id, float(np.clip(similarity, -1.0, 1.0)), is_duplicate=False)
            # Skip the trace itself, which a late redelivery has appended again.
            similarities[offset] = -np.inf
        return None

    def _duplicate(self, own: int, rows: range) -> Nearest | None:
        same = rows.start + np.flatnonzero(self._digests[rows.start : rows.stop] == self._digests[own])
        for row in same[self._bounds_for(own)[same] > 0]:
            trace_id = self._trace_ids[row]
            if trace_id != self._trace_ids[own]:
                return Nearest(trace_id, 1.0, is_duplicate=True)
        return None

    def _bounds_for(self, own: int) -> NDArray[np.float32]:
        bounds: NDArray[np.float32] = self._bounds[int(self._bounds[1, own] > 0)]
        return bounds

    def _drop_oldest(self, count: int) -> None:
        size = len(self)
        for array in (self._vectors, self._times, self._numbers, self._digests, *self._bounds):
            # Move bytes: numpy would copy everything twice if source and target overlap.
            memory, row_bytes = memoryview(array).cast("B"), array.strides[0]
            memory[: (size - count) * row_bytes] = memory[count * row_bytes : size * row_bytes]
        del self._trace_ids[:count]


class NoveltyCache:
    """Joins a log and this process's mirror of it. One thread owns it."""

    def __init__(self, log: NoveltyLog, window: Window, dimensions: int) -> None:
        self._log = log
        self.mirror = Mirror(window, dimensions)  # Any thread may read its length.

    def catch_up(self) -> int:
        """Read the log to its end, in chunks, and return the length of the mirror; raise as :meth:`place` does."""
        self._append(())
        return len(self.mirror)

    def place(self, candidates: Sequence[Candidate]) -> list[Placement | None]:
        """Append the new candidates, and compare each, by the vector in the log, with the entries before its own.

        Returns the place and the nearest entry of each; None if its id has another digest. Raises SettingsError if the log is
        not empty and has another window, and ServiceUnavailable if it cannot be reached, or was emptied meanwhile. Placing is
        idempotent, so the caller may retry.
        """
        places = self._append(candidates)
        try:
            nearest = iter(self.mirror.nearest([place for place in places if place]))
        except KeyError:
            raise ServiceUnavailable("novelty log: it was emptied while traces were placed in it") from None
        return [Placement(place, next(nearest)) if place else None for place in places]

    def _append(self, candidates: Sequence[Candidate]) -> list[Place | None]:
        # A comparison with part of a window would give a novelty that the log does not explain, so the mirror has to catch up
        # first. Each round admits the candidates again: if the log is trimmed meanwhile, those whose windows were cut get new
        # places. The loop terminates because a batch is small compared with the slack and with the entries that a round reads.
        while True:
            places, tail = self._log.append(candidates, self.mirror.cursor)
            self.mirror.apply(tail)
            if not tail.more:
                return places
