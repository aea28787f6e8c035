"""Holds the gate's view of one domain: its last runs with their covers, and its kept traces."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.gate.facts import TICKS, Rows, row_type

HALF_LIVES: Final = 4  # The standing of a kept trace halves this many times until it expires.


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
        self._ttl = bounds.kept_ttl_ms * TICKS
        self.most_runs = bounds.most_runs
        self.runs = Table(dimensions)
        self.kept_rows = Table(dimensions)
        self.kept_ids: list[str] = []
        self._covers_at = 0  # The place that the covers in ``runs`` are as of.

    def covers(self, at: int) -> NDArray[np.float64]:
        """Return the covers of the runs as of a place, of shape (runs,)."""
        covers: NDArray[np.float64] = self.runs["cover"] * self._standing(self._covers_at, at)
        return covers

    def extend(self, facts: Rows, kept_ids: Sequence[str], *, are_runs: bool) -> None:
        """Add facts, oldest first: as runs, unless they are no runs, and those of kept traces with the ids of these traces."""
        now = since = int(facts["at"][-1])
        covers = self.runs["cover"]
        covers *= self._standing(self._covers_at, now)
        self._covers_at = now
        if are_runs:
            self.runs.extend(facts[-self.most_runs :])
            self.runs.drop(max(0, len(self.runs) - self.most_runs))
            added = self.runs.newest(len(facts))
            # The first decisions of a space rest on no fact, so the places of their own facts count.
            added["cover"] *= self._standing(np.where(added["as_of"], added["as_of"], added["at"]), now)
            since = added["as_of"].min()
        # A run is also covered by the traces that were kept after the facts that its decision rests on.
        first = int(np.searchsorted(self.kept_rows["at"], since, "right"))
        self.kept_rows.extend(facts[facts["is_kept"]])
        self.kept_ids += kept_ids
        if first < len(self.kept_rows):
            at = self.kept_rows["at"][first:, None]
            raised = self.kept_rows["vector"][first:] @ self.runs["vector"].T * self._standing(at, now)
            covers = self.runs["cover"]
            np.maximum(covers, np.where(at > self.runs["as_of"], raised, 0.0).max(axis=0), out=covers)

    def drop_kept(self, at: int) -> None:
        """Let the trace that was kept at a place cover no further runs; the covers of earlier runs stay the same.

        Its row stays until it is dropped as the oldest one.
        """
        self.kept_rows["vector"][np.searchsorted(self.kept_rows["at"], at)] = 0.0

    def drop_oldest_kept(self) -> None:
        """Forget the trace that was kept first; the covers of runs stay the same."""
        self.kept_rows.drop(1)
        del self.kept_ids[0]

    def drop_runs(self, at: int) -> None:
        """Drop the runs up to a place with their covers; the covers of other runs stay the same."""
        self.runs.drop(int(np.searchsorted(self.runs["at"], at, "right")))

    def weights(self, rows: "Table", at: int) -> NDArray[np.float64]:
        """Return the weight of each kept trace, or run, as of a place, of shape (rows,); 0 once it has expired."""
        return np.where(at - rows["at"] < self._ttl, self._standing(rows["at"], at), 0.0)

    def _standing(self, since: NDArray[np.int64] | int, at: int) -> NDArray[np.float64]:
        standing: NDArray[np.float64] = np.exp2(np.minimum((since - at) / (self._ttl / HALF_LIVES), 0.0))
        return standing


class Table:
    """Facts with their places, oldest first, as the rows of a growing array."""

    def __init__(self, dimensions: int) -> None:
        self._rows: Rows = np.empty(0, row_type(dimensions))
        self._first = self._end = 0

    def __len__(self) -> int:
        return self._end - self._first

    def __getitem__(self, column: str) -> NDArray[Any]:
        return self._rows[column][self._first : self._end]

    def newest(self, count: int) -> Rows:
        """Return at most this many of the newest rows."""
        return self._rows[max(self._first, self._end - count) : self._end]

    def extend(self, rows: Rows) -> None:
        """Add rows as the newest ones."""
        if self._end + len(rows) > len(self._rows):
            moved = np.empty(2 * (len(self) + len(rows)), self._rows.dtype)
            moved[: len(self)] = self.newest(len(self))
            self._rows, self._first, self._end = moved, 0, len(self)
        self._rows[self._end : self._end + len(rows)] = rows
        self._end += len(rows)

    def drop(self, count: int) -> None:
        """Drop the oldest rows."""
        self._first += count
