"""Recompute novelty from the log and compare it with what was decided."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.decision import Decision
from kp_scorer.novelty.log import Entry, Window
from kp_scorer.scoring import novelty_of

TOLERANCE: Final = 1e-5
"""Novelty may differ by this much: the last bits of a similarity depend on how many were computed together."""

_LOOKED_UP_AT_ONCE: Final = 500


class Decided(NamedTuple):
    """A decision, and the 16-byte digest of what was decided."""

    decision: Decision
    digest: bytes


class Difference(NamedTuple):
    """A decision whose novelty is not what the log gives, or whose entry holds something else than what was decided."""

    trace_id: str
    entry: str
    decided: float
    recomputed: float
    is_of_other_content: bool


@dataclass(slots=True)
class Report:
    """What an audit of one log found. Every entry counts in exactly one of the other figures."""

    entries: int = 0
    agreeing: int = 0
    differences: list[Difference] = field(default_factory=list)
    undecided: int = 0
    """Placed in the log and not decided (yet), or decided elsewhere: before a late redelivery, or before the log was warmed."""
    beyond: int = 0
    """Decided, but entries of their window have left the log or were erased since, so it cannot be checked."""


Decisions = Callable[[Sequence[str]], Sequence[Decided | None]]
"""Looks up the decisions on traces by their ids, in order; None for a trace that has none."""


def audit(entries: Sequence[Entry], decisions: Decisions, window: Window, advance: Callable[[int, int], None]) -> Report:
    """Replay all entries of a log against the decisions; ``advance`` gets the number done and the total.

    It does not use the mirror but the definition of novelty, one entry at a time.
    """
    report = Report(entries=len(entries))
    if not entries:
        return report
    replay = _Replay(entries, window)
    for index, found in enumerate(_in_order(entries, decisions)):
        advance(index + 1, len(entries))
        entry = entries[index]
        if found is None or found.decision.novelty.entry != str(entry.place):
            report.undecided += 1
            continue
        similarity, decided = replay.similarity(index), found.decision.dimensions.novelty
        recomputed = novelty_of(similarity)
        # Without the entries that are gone, novelty can only seem higher than it was, or unknown.
        if found.digest != entry.digest:
            report.differences.append(Difference(entry.trace_id, str(entry.place), decided, recomputed, True))
        elif not replay.is_whole(index) and (similarity is None or recomputed > decided - TOLERANCE):
            report.beyond += 1
        elif abs(recomputed - decided) <= TOLERANCE:
            report.agreeing += 1
        else:
            report.differences.append(Difference(entry.trace_id, str(entry.place), decided, recomputed, False))
    return report


def _in_order(entries: Sequence[Entry], decisions: Decisions) -> Iterator[Decided | None]:
    for start in range(0, len(entries), _LOOKED_UP_AT_ONCE):
        yield from decisions([entry.trace_id for entry in entries[start : start + _LOOKED_UP_AT_ONCE]])


class _Replay:
    def __init__(self, entries: Sequence[Entry], window: Window) -> None:
        self._window = window
        self._vectors = np.stack([entry.vector for entry in entries])
        self._numbers = np.array([entry.place.number for entry in entries])
        self._times = np.array([entry.place.time_ms for entry in entries])
        self._ids = np.array([entry.trace_id for entry in entries])
        self._digests = np.array([entry.digest.hex() for entry in entries])

    def similarity(self, index: int) -> float | None:
        """The largest similarity to the trace at ``index`` among the entries of its window that the log still holds."""
        rows = self._rows(index)
        rows = rows[self._ids[rows] != self._ids[index]]
        if not rows.size:
            return None
        if (self._digests[rows] == self._digests[index]).any():
            return 1.0
        return float((self._vectors[rows] @ self._vectors[index]).max())

    def is_whole(self, index: int) -> bool:
        """Whether the log still holds every entry of the window."""
        first = max(1, self._numbers[index] - self._window.max_elements)
        oldest_ms = self._times[index] - self._window.ttl_ms
        if self._numbers[0] > first and self._times[0] > oldest_ms:
            return False
        # Places count up by one, so a gap is where entries were erased.
        row = np.searchsorted(self._numbers, first, "left")
        return bool(self._numbers[index] - max(first, self._numbers[0]) == index - row)

    def _rows(self, index: int) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
        by_number = np.searchsorted(self._numbers, self._numbers[index] - self._window.max_elements, "left")
        by_age = np.searchsorted(self._times, self._times[index] - self._window.ttl_ms, "right")
        return np.arange(max(by_number, by_age), index)
