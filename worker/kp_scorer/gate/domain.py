"""Holds the gate's view of one domain: its last runs with their covers, and its kept traces."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.gate.facts import Fact, Vectors
from kp_scorer.novelty.log import Place

HALF_LIVES: Final = 4  # The standing of a kept trace halves this many times until it expires.

PlacedFact = tuple[Place, Fact]
_TICKS: Final = 2**20  # A place as a number counts this many ticks per millisecond.


class GateBounds(NamedTuple):
    """The bounds on the number and age of kept traces in a space, on its facts, and on the runs of a domain."""

    kept_elements: int
    kept_ttl_ms: int
    most_facts: int = 10_000  # Only this many of the newest count: a domain without any among them has no runs.
    most_runs: int = 200


class Domain:
    """The last runs of one domain with their covers, and its kept traces."""

    def __init__(self, dimensions: int, bounds: GateBounds) -> None:
        self.kept_ttl_ms = bounds.kept_ttl_ms
        self._ttl = bounds.kept_ttl_ms * _TICKS
        self.most_runs = bounds.most_runs
        self.runs = _Rows(dimensions)
        self.kept_rows = _Rows(dimensions)
        self._covers = np.empty(0)
        self._covers_at = 0

    def covers(self, at: int) -> NDArray[np.float64]:
        """Return the covers of the runs as of a place, of shape (runs,)."""
        return self._covers * self._standing(self._covers_at, at)

    def extend(self, runs: Sequence[PlacedFact], kept_facts: Sequence[PlacedFact]) -> None:
        """Add runs and kept traces, each oldest first."""
        now = max(number_of(each[-1][0]) for each in (runs, kept_facts) if each)
        runs, new = runs[-self.most_runs :], slice(len(self.runs), None)
        self.runs.extend(runs)
        recorded = np.array([fact.cover for _, fact in runs])
        since = self.runs.as_of[new]
        # The first decisions of a space rest on no fact, so the places of their own facts count.
        recorded_at = np.where(since, since, self.runs.at[new])
        self._covers = np.concatenate([self.covers(now), recorded * self._standing(recorded_at, now)])
        self._covers_at = now
        self.drop_runs(len(self.runs) - self.most_runs)
        # A run is also covered by the traces that were kept after the facts that its decision rests on.
        first = int(np.searchsorted(self.kept_rows.at, since.min(initial=now), "right"))
        self.kept_rows.extend(kept_facts)
        if first < len(self.kept_rows):
            at = self.kept_rows.at[first:]
            raised = self.runs.vectors @ self.kept_rows.vectors[first:].T * self._standing(at, now)
            self._covers = np.maximum(self._covers, np.where(at > self.runs.as_of[:, None], raised, 0.0).max(axis=1))

    def drop_kept(self, at: int) -> None:
        """Let the trace that was kept at a place cover no further runs; the covers of earlier runs stay the same.

        Its row stays until it is dropped as the oldest one.
        """
        self.kept_rows.vectors[np.searchsorted(self.kept_rows.at, at)] = 0.0

    def drop_runs(self, count: int) -> None:
        """Drop the oldest runs with their covers; the covers of other runs stay the same."""
        if count > 0:
            self.runs.drop(count)
            self._covers = self._covers[count:]

    def kept_standing(self, at: int) -> NDArray[np.float64]:
        """Return for each kept trace the share of its similarity that counts as of a place; 0 once the trace has expired."""
        return self._unexpired(self.kept_rows.at, at)

    def demand(self, at: int) -> NDArray[np.float64]:
        """Return the weight of each run as of a place; 0 once the run has expired."""
        return self._unexpired(self.runs.at, at)

    def _unexpired(self, since: NDArray[np.int64], at: int) -> NDArray[np.float64]:
        return np.where(at - since < self._ttl, self._standing(since, at), 0.0)

    def _standing(self, since: NDArray[np.int64] | int, at: int) -> NDArray[np.float64]:
        standing: NDArray[np.float64] = np.exp2(np.minimum((since - at) / (self._ttl / HALF_LIVES), 0.0))
        return standing


class _Rows:
    """Facts as arrays, oldest first: places, and the places that they rest on, as numbers; amounts added; and vectors."""

    def __init__(self, dimensions: int) -> None:
        self._vectors = np.empty((0, dimensions), np.float32)
        self._first = 0
        self.trace_ids: list[str] = []
        self.at = self.as_of = np.empty(0, np.int64)
        self.adds = np.empty(0)

    def __len__(self) -> int:
        return len(self.trace_ids)

    @property
    def vectors(self) -> Vectors:
        return self._vectors[self._first : self._first + len(self)]

    def extend(self, added: Sequence[PlacedFact]) -> None:
        """Add facts with copies of their vectors: the original vectors would keep all that was read with them in memory."""
        if not added:
            return
        if self._first + len(self) + len(added) > len(self._vectors):
            moved = np.empty((2 * (len(self) + len(added)), self._vectors.shape[1]), np.float32)
            moved[: len(self)] = self.vectors
            self._vectors, self._first = moved, 0
        self.trace_ids += [fact.trace_id for _, fact in added]
        self.vectors[-len(added) :] = [fact.vector for _, fact in added]
        self.at = np.concatenate([self.at, [number_of(place) for place, _ in added]])
        self.as_of = np.concatenate([self.as_of, [number_of(fact.as_of) for _, fact in added]])
        self.adds = np.concatenate([self.adds, [fact.adds for _, fact in added]])

    def drop(self, count: int) -> None:
        """Drop the oldest facts."""
        self._first += count
        del self.trace_ids[:count]
        self.at, self.as_of, self.adds = self.at[count:], self.as_of[count:], self.adds[count:]


def number_of(place: Place) -> int:
    """Return a place as a number, in the same order and in proportion to time.

    Redis never assigns a million places in one millisecond, so they do not overlap.
    """
    return place.time_ms * _TICKS + place.number
