"""Recompute novelty from the log and compare it with what was decided."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import sample
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.decision import Decision, Nearest
from kp_scorer.novelty.log import Entry, Place, Tail, Window
from kp_scorer.novelty.mirror import Mirror
from kp_scorer.scoring import novelty_of

TOLERANCE: Final = 1e-5
"""Novelty may differ by this much: the last bits of a similarity depend on how many were computed together."""
_LOOKED_UP_AT_ONCE: Final = 500
_BEFORE_ALL: Final = Place(0, 0)


class DecidedTrace(NamedTuple):
    """A decision, the 16-byte digest of the trace's content, and whether its label is good."""

    decision: Decision
    digest: bytes
    good: bool | None = None  # None without a label.


class Difference(NamedTuple):
    """A decision whose novelty is not what the log gives, or whose entry holds other content than was decided."""

    trace_id: str
    entry: str
    decided: float
    recomputed: float
    is_of_other_content: bool


@dataclass(slots=True)
class Report:
    """The result of an audit of one log. Every entry counts in exactly one of the other figures."""

    entries: int = 0
    agreeing: int = 0
    differences: list[Difference] = field(default_factory=list)
    undecided: int = 0
    """Placed in the log and not decided (yet), or decided at another place: before a late redelivery or the log's warming."""
    beyond: int = 0
    """Decided, but entries of the window have left the log or were erased since, perhaps the nearest, and so unchecked."""
    damaged: int = 0  # Holds no trace or no vector, as somebody has changed the log.
    last: Place | None = None  # Of the newest entry that was compared with its decision.


Decisions = Callable[[Sequence[str]], Sequence[DecidedTrace | None]]
"""Looks up the decisions on traces by their ids, in order; None for a trace without one."""


def audit(
    entries: Sequence[Entry],
    decisions: Decisions,
    window: Window,
    advance: Callable[[int, int], None],
    most: int | None = None,
    since: Place = _BEFORE_ALL,
) -> Report:
    """Replay the entries of a log after a place, or ``most`` of them, chosen at random, against the decisions.

    ``advance`` gets the number done and the total. It uses the definition of novelty, one entry at a time, and not the mirror.
    """
    intact = _intact(entries)
    # Only the end of what is replayed: their windows reach back beyond it.
    later = range(bisect_right(intact, since, key=lambda entry: entry.place), len(intact))
    indices = later if most is None or most >= len(later) else sorted(sample(later, most))
    damaged = sum(entry.place > since for entry in entries) - len(later)
    report = Report(entries=len(indices) + damaged, damaged=damaged)
    if not intact:
        return report
    replay = _Replay(intact, window)
    chosen = [intact[index] for index in indices]
    for done, (index, entry, trace) in enumerate(zip(indices, chosen, _in_order(chosen, decisions), strict=True), 1):
        advance(done, len(chosen))
        if trace is None or trace.decision.novelty.entry != str(entry.place):
            report.undecided += 1
            continue
        report.last = entry.place
        similarity, decided = replay.similarity(index), trace.decision.dimensions.novelty
        recomputed = novelty_of(similarity if trace.decision.novelty.source != "unreadable" else None)
        is_of_other_content = trace.digest != entry.digest
        # Without the entries that are gone, novelty can only seem higher than it was, or unknown.
        may_seem_higher = not is_of_other_content and not replay.is_complete(index)
        if may_seem_higher and (similarity is None or recomputed > decided + TOLERANCE):
            report.beyond += 1
        elif is_of_other_content or abs(recomputed - decided) > TOLERANCE:
            place = str(entry.place)
            report.differences.append(Difference(entry.trace_id, place, decided, recomputed, is_of_other_content))
        else:
            report.agreeing += 1
    return report


def left_since(since: Place, oldest: Place) -> str:
    """Return how many entries that were placed after ``since`` have left a log, by its oldest entry; empty if none."""
    if oldest <= since or oldest.number == since.number + 1:
        return ""
    if since.number >= oldest.number:
        # It was emptied, and counts from 1 again; or this is an entry of another log.
        return "an unknown number"
    # Times have no number.
    return f"{'at most ' if since.time_ms and not since.number else ''}{oldest.number - 1 - since.number}"


def with_nearest(decision: Decision, entries: Sequence[Entry], window: Window) -> Decision:
    """The decision with the nearest earlier trace, which it may not name; as it is if the log's entries do not give it."""
    novelty, entries = decision.novelty, _intact(entries)
    if novelty.nearest or not novelty.entry or not entries:
        return decision
    mirror = Mirror(window, len(entries[-1].vector))
    mirror.apply(Tail("", entries, (), restart=False, more=False))
    try:
        (nearest,) = mirror.nearest([Place.parse(novelty.entry)])
    except KeyError:
        return decision
    if nearest is None or abs(novelty_of(nearest.similarity) - decision.dimensions.novelty) > TOLERANCE:
        return decision
    named = {
        "nearest": Nearest(trace_id=nearest.trace_id, similarity=nearest.similarity),
        "duplicate_of": nearest.trace_id if nearest.is_duplicate else None,
    }
    return decision.model_copy(update={"novelty": novelty.model_copy(update=named)})


def _intact(entries: Sequence[Entry]) -> list[Entry]:
    """Those with a trace, and a vector of as many dimensions as most have."""
    entries = [entry for entry in entries if entry.trace_id]
    dimensions = Counter(len(entry.vector) for entry in entries).most_common(1)
    return [entry for entry in entries if len(entry.vector) == dimensions[0][0]]


def _in_order(entries: Sequence[Entry], decisions: Decisions) -> Iterator[DecidedTrace | None]:
    for start in range(0, len(entries), _LOOKED_UP_AT_ONCE):
        yield from decisions([entry.trace_id for entry in entries[start : start + _LOOKED_UP_AT_ONCE]])


class _Replay:
    def __init__(self, entries: Sequence[Entry], window: Window) -> None:
        self._window = window
        self._vectors = np.stack([entry.vector for entry in entries])
        self._numbers = np.array([entry.place.number for entry in entries])
        self._times = np.array([entry.place.time_ms for entry in entries])
        # Numbers in their place, which compare faster.
        self._ids = np.unique([entry.trace_id for entry in entries], return_inverse=True)[1]
        self._digests = np.unique([(entry.visible or entry.digest).hex() for entry in entries], return_inverse=True)[1]
        self._counts = np.array([entry.counts for entry in entries])

    def similarity(self, index: int) -> float | None:
        """The largest similarity to the trace at ``index`` among what counts for it in its window and is still in the log."""
        rows = self._rows(index)
        counting = (self._counts[rows] | ~self._counts[index]) & (self._ids[rows] != self._ids[index])
        if not counting.any():
            return None
        if (self._digests[rows] == self._digests[index])[counting].any():
            return 1.0
        return float((self._vectors[rows] @ self._vectors[index])[counting].max())

    def is_complete(self, index: int) -> bool:
        """Whether the log still holds every entry of the window."""
        first = max(1, self._numbers[index] - self._window.max_elements)
        oldest_ms = self._times[index] - self._window.ttl_ms
        if self._numbers[0] > first and self._times[0] > oldest_ms:
            return False
        # Places count up by one, so a gap is where entries were erased.
        row = np.searchsorted(self._numbers, first, "left")
        return bool(self._numbers[index] - max(first, self._numbers[0]) == index - row)

    def _rows(self, index: int) -> slice:
        by_number = np.searchsorted(self._numbers, self._numbers[index] - self._window.max_elements, "left")
        by_age = np.searchsorted(self._times, self._times[index] - self._window.ttl_ms, "right")
        return slice(max(by_number, by_age), index)
