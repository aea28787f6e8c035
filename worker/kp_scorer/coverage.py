"""Chooses a set: the few runs that together cover all runs best.

A kept run stands for the runs that are like it. The cover of a run is its largest similarity to any kept run, and a run adds
the amount by which keeping it would raise the covers of all runs, including its own. A failed run cannot be kept, but its
cover counts, too, because it shows a task that users ask for: a success after many similar failures adds much, and a copy of a
kept run adds nothing. Each step keeps the run that adds the most. This is the greedy algorithm for facility location, whose
cover is at least 1 - 1/e of the best possible (Nemhauser, Wolsey and Fisher 1978: "An analysis of approximations for maximizing
submodular set functions").
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

BATCH: Final = 2_048
"""The number of runs that are compared with each other at once: their similarities take 16 MB."""

_COMPARED: Final = 256

NOTHING: Final = 1e-4
"""The rounding of float32 lets an exact copy of a kept run add at most this much, in whole runs."""

Vectors = NDArray[np.float32]


class StandIn(NamedTuple):
    """The kept run that is most like another one."""

    number: int  # The index of the kept run, from 0, in the order in which runs were kept.
    similarity: float  # 0..1


class KeptRun(NamedTuple):
    """A run that :meth:`Coverage.choose` has chosen."""

    place: int  # Its index in the batch that it was chosen from.
    adds: float  # The amount by which it raised the covers of the batch's runs, in whole runs.


class Coverage:
    """The kept runs of one domain. They grow batch by batch, and each choice takes account of the runs kept before."""

    def __init__(self, earlier: Vectors) -> None:
        """Begin with the runs that were kept earlier, as unit vectors of shape (runs, dimensions)."""
        self._vectors = earlier
        self._by_task = Counter[int]()

    def choose(
        self,
        vectors: Vectors,
        eligible: Sequence[bool],
        most: int,
        least: float = NOTHING,
        tasks: Sequence[int] | None = None,
        most_by_task: float = math.inf,
    ) -> list[KeptRun]:
        """Keep up to ``most`` runs of a batch, each time the one that adds the most; return them in this order.

        ``vectors`` are the unit vectors of at most :data:`BATCH` runs, of shape (runs, dimensions). Only runs that are
        ``eligible`` can be chosen. A run that adds no more than ``least``, such as a copy, is not kept even if there is room.
        ``tasks`` has the number of each run's task; at most ``most_by_task`` runs of a task are kept, counting earlier batches.
        """
        candidates = np.flatnonzero(eligible)
        similarities = np.maximum(vectors[candidates] @ vectors.T, 0.0)
        covers = self._covers(vectors)
        # The amount that a run adds can only shrink as others are kept, so an outdated amount is an upper bound. If the run at
        # the head of the heap still leads once its own amount is up to date, it adds the most. Few others need an update.
        heap = [(-float(added), place) for place, added in enumerate(_added(similarities, covers))]
        heapq.heapify(heap)
        chosen: list[KeptRun] = []
        while heap and len(chosen) < most:
            _, place = heap[0]
            adds = float(_added(similarities[place], covers))
            if adds <= least or (tasks is not None and self._by_task[tasks[candidates[place]]] >= most_by_task):
                heapq.heappop(heap)
            elif adds < -heap[0][0]:
                heapq.heapreplace(heap, (-adds, place))
            else:
                heapq.heappop(heap)
                covers = np.maximum(covers, similarities[place])
                chosen.append(KeptRun(int(candidates[place]), adds))
                if tasks is not None:
                    self._by_task[tasks[candidates[place]]] += 1
        self.keep(vectors[[run.place for run in chosen]])
        return chosen

    def keep(self, vectors: Vectors) -> None:
        """Add runs that were chosen in another way, as unit vectors of shape (runs, dimensions)."""
        self._vectors = np.concatenate([self._vectors, vectors])

    def stand_ins(self, vectors: Vectors) -> list[StandIn]:
        """Return for each run the kept run that is most like it; an empty list while no run is kept.

        ``vectors`` are unit vectors of shape (runs, dimensions).
        """
        if not len(self._vectors):
            return []
        similarities = vectors @ self._vectors.T
        nearest = similarities.argmax(axis=1)
        largest = np.clip(similarities[np.arange(len(vectors)), nearest], 0.0, 1.0)
        return [StandIn(int(number), float(similarity)) for number, similarity in zip(nearest, largest, strict=True)]

    def _covers(self, vectors: Vectors) -> NDArray[np.float32]:
        if not len(self._vectors):
            return np.zeros(len(vectors), np.float32)
        # Compare a part of the batch at a time: its similarities to 100,000 kept runs would take 800 MB at once.
        parts = np.array_split(vectors, max(1, len(vectors) // _COMPARED))
        largest: NDArray[np.float32] = np.concatenate([(part @ self._vectors.T).max(axis=1) for part in parts])
        return np.maximum(largest, 0.0)


def _added(similarities: NDArray[np.float32], covers: NDArray[np.float32]) -> NDArray[np.float32]:
    added: NDArray[np.float32] = np.maximum(similarities - covers, 0.0).sum(axis=-1)
    return added


def apportioned(runs: Sequence[int], most: int) -> list[int]:
    """Divide ``most`` places among domains in proportion to their numbers of ``runs``; return the number for each domain.

    The places that are left over go to the largest remainders, and among equal remainders to the earlier domain. No more places
    are given than there are runs.
    """
    total = sum(runs)
    most = min(most, total)
    shares = [most * each / total for each in runs] if total else [0.0] * len(runs)
    places = [int(share) for share in shares]
    by_remainder = sorted(range(len(runs)), key=lambda domain: places[domain] - shares[domain])
    for domain in by_remainder[: most - sum(places)]:
        places[domain] += 1
    return places
