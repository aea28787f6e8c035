"""Recomputes novelty from the log and compares it with the decisions."""

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
"""A smaller difference of novelty is rounding: the last bits of a similarity depend on how many are computed together."""
_LOOKED_UP_AT_ONCE: Final = 500
_BEFORE_ALL: Final = Place(0, 0)


class DecidedTrace(NamedTuple):
    """The newest decision on a trace, with the 16-byte digest of the trace's content and its label."""

    decision: Decision
    digest: bytes
    good: bool | None = None  # None without a label.
    first: Decision | None = None  # The first decision, which the facts of the gate rest on; None unless it was revised.

    @property
    def succeeded(self) -> bool:
        """True if the trace was good by its label or, without one, by its decision."""
        return self.decision.succeeded if self.good is None else self.good


class Difference(NamedTuple):
    """A decision that contradicts the log: by its novelty, or because its entry has other content."""

    trace_id: str
    entry: str
    decided: float
    recomputed: float
    is_of_other_content: bool


@dataclass(slots=True)
class Report:
    """The result of an audit of one log. Every entry counts in exactly one of the other numbers."""

    entries: int = 0
    agreeing: int = 0
    differences: list[Difference] = field(default_factory=list)
    undecided: int = 0
    """Entries without a decision at their place. The trace is still undecided, or was decided at another place: before a late
    redelivery, or before the log was warmed."""
    beyond: int = 0
    """Decided entries that cannot be checked: an entry of their window, perhaps the nearest, has left the log or was erased."""
    damaged: int = 0  # Entries without a trace or a vector: somebody has changed the log.
    last: Place | None = None  # The newest place whose entry was compared with its decision.


Decisions = Callable[[Sequence[str]], Sequence[DecidedTrace | None]]
"""Looks up the decisions on traces by id, in their order; None for a trace without one."""


def audit(
    entries: Sequence[Entry],
    decisions: Decisions,
    window: Window,
    advance: Callable[[int, int], None],
    most: int | None = None,
    since: Place = _BEFORE_ALL,
) -> Report:
    """Compare the entries of a log after ``since``, or ``most`` of them at random, with their decisions.

    Novelty is computed by its definition, one entry at a time, and not by the mirror. ``advance`` receives the number of
    entries that are done, and the total.
    """
    intact = _intact(entries)
    # Earlier entries are needed as well, as windows reach back beyond ``since``.
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
        # An entry that is gone can only make novelty seem higher than it was, or unknown.
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
    """Return in words the number of entries after ``since`` that have left a log with this oldest entry; empty for none."""
    if oldest <= since or oldest.number == since.number + 1:
        return ""
    if since.number >= oldest.number:
        # The log was emptied, and counts from 1 again; or ``since`` is a place in another log.
        return "an unknown number"
    # A place that stands for a time has the number 0, so nobody knows which entry came next.
    return f"{'at most ' if since.time_ms and not since.number else ''}{oldest.number - 1 - since.number}"


def with_nearest(decision: Decision, entries: Sequence[Entry], window: Window) -> Decision:
    """Return a decision with its nearest earlier trace filled in if it omits that; unchanged if the entries do not show it."""
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
    """Return the entries with a trace, and with a vector of the dimensions that most have."""
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
        # Numbers stand for ids and digests, because numbers compare faster.
        self._ids = np.unique([entry.trace_id for entry in entries], return_inverse=True)[1]
        self._digests = np.unique([(entry.visible or entry.digest).hex() for entry in entries], return_inverse=True)[1]
        self._comparable = np.array([entry.is_comparable for entry in entries])

    def similarity(self, index: int) -> float | None:
        """Return the largest similarity to the trace at ``index`` among the remaining comparable entries of its window."""
        rows = self._rows(index)
        is_candidate = (self._comparable[rows] | ~self._comparable[index]) & (self._ids[rows] != self._ids[index])
        if not is_candidate.any():
            return None
        if (self._digests[rows] == self._digests[index])[is_candidate].any():
            return 1.0
        return float((self._vectors[rows] @ self._vectors[index])[is_candidate].max())

    def is_complete(self, index: int) -> bool:
        """Return whether the log still holds every entry of the window."""
        first = max(1, self._numbers[index] - self._window.max_elements)
        oldest_ms = self._times[index] - self._window.ttl_ms
        if self._numbers[0] > first and self._times[0] > oldest_ms:
            return False
        # Numbers increase by one, so a gap shows an erased entry.
        row = np.searchsorted(self._numbers, first, "left")
        return bool(self._numbers[index] - max(first, self._numbers[0]) == index - row)

    def _rows(self, index: int) -> slice:
        by_number = np.searchsorted(self._numbers, self._numbers[index] - self._window.max_elements, "left")
        by_age = np.searchsorted(self._times, self._times[index] - self._window.ttl_ms, "right")
        return slice(max(by_number, by_age), index)
