"""The gate that keeps what teaches, one trace at a time: a trace is accepted for what it adds to those kept of its domain.

The cover of a run is its largest similarity to a kept trace, and a trace adds as much as it would raise the covers of the last
runs of its domain, and its own (``coverage.py`` has the same for a set). It is accepted if that reaches the bar of its domain:
what the asked share of those runs added when they were decided. Demand and cover halve with age: what was kept long ago does
not keep out what is asked for today.

Each decision leaves a fact for later ones: its vector, its cover, and whether its trace is kept. Facts are stored in the step
that stores the decision, so their order is one for all workers. A decision rests on the facts up to one that it names, and on
its mates: those of its domain that are stored right before it, in the same step. So no worker waits for another, what is kept
follows from the facts alone, and an audit can recompute every decision.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.gate.facts import BEGINNING, VECTOR, Fact, FactLog, StoredFact, Vectors
from kp_scorer.novelty.log import Place

LEAST_BAR: Final = 0.05  # A copy of a kept trace adds less, also where most runs may be kept.
HALF_LIVES: Final = 4  # In which a kept trace loses its standing, before it expires.

Requirement = Literal["success"] | float
_Placed = tuple[Place, Fact]
_TICKS: Final = 2**20  # Of a millisecond, where a place is a number.


class GateBounds(NamedTuple):
    """How many kept traces a space holds, and for how long; how many facts; and the runs of a domain whose covers count."""

    kept_elements: int
    kept_ttl_ms: int
    most_facts: int = 10_000  # A domain without one among these has no runs.
    most_runs: int = 200


class GatePolicy(NamedTuple):
    """What the gate lets through."""

    share: float  # Of a domain's traces, which its bar follows.
    bar: float | None = None  # A fixed bar, which follows nothing.
    requires: Requirement = "success"  # Or the least outcome dimension.

    def admits(self, success: bool, outcome_confidence: float) -> bool:
        """Return whether a trace meets the requirement."""
        return success if self.requires == "success" else outcome_confidence >= self.requires


class Weighed(NamedTuple):
    """What a trace adds, and what that is held against."""

    adds: float
    bar: float
    share: float | None  # The share that the bar follows; None if it is fixed.
    nearest: tuple[str, float] | None  # The kept trace that covers it best, and their similarity.
    as_of: Place


class Gate:
    """What this process knows of the facts: of each domain its runs, the kept traces and the bar. One thread owns it."""

    def __init__(self, log: FactLog, dimensions: int, bounds: GateBounds, policy: GatePolicy) -> None:
        self._log = log
        self._dimensions = dimensions
        self._bounds = bounds
        self.policy = policy
        self._begin()

    def _begin(self) -> None:
        self._domains: defaultdict[str, _Domain] = defaultdict(lambda: _Domain(self._dimensions, self._bounds))
        self._facts = deque[tuple[Place, str]]()  # The places that the log holds, as it is trimmed, and their domains.
        self._kept_places = deque[tuple[Place, str]]()
        self._cursor: Place | None = None

    def catch_up(self) -> int:
        """Read the facts to their end, and return the number of kept traces; ServiceUnavailable if they cannot be read."""
        erased, is_anew = set[Place](), False
        while True:
            tail = self._log.read(self._cursor)
            if tail.restart:
                self._begin()
                continue
            # Later ones are among the facts, too.
            self._keep([each for each in tail.kept_facts if not tail.facts or each.place < tail.facts[0].place])
            self._apply(tail.facts)
            erased.update(stored.erased for stored in tail.facts if stored.erased)
            if tail.more:
                continue
            if is_anew or not erased or erased.isdisjoint(place for place, _ in (*self._facts, *self._kept_places)):
                return len(self._kept_places)
            # What the erased fact did to others cannot be undone one by one. Once is enough: a note may also lie.
            self._begin()
            is_anew = True

    def weigh(self, traces: Sequence[tuple[str, str, Vectors]]) -> "Batch":
        """Hold traces, each an id, a domain and a vector, against what is known; each also against those before it."""
        return Batch(self._domains, traces, self._cursor or BEGINNING, self.policy)

    def _keep(self, earlier: Sequence[StoredFact]) -> None:
        by_domain = defaultdict[str, list[_Placed]](list)
        kept_facts = [(place, fact) for place, fact, _ in earlier if fact and fact.vector.shape == (self._dimensions,)]
        for place, fact in kept_facts:
            by_domain[fact.domain].append((place, fact))
        for domain, group in by_domain.items():
            self._domains[domain].kept_rows.extend(group)
        self._trim_kept(kept_facts)

    def _apply(self, tail: Sequence[StoredFact]) -> None:
        by_domain = defaultdict[str, list[_Placed]](list)
        kept_facts: list[_Placed] = []
        for place, fact, _ in tail:
            self._cursor, domain = place, ""
            if fact and fact.vector.shape == (self._dimensions,):
                domain = fact.domain
                by_domain[domain].append((place, fact))
                kept_facts += [(place, fact)] * fact.is_kept
            self._facts.append((place, domain))
        for domain, group in by_domain.items():
            self._domains[domain].extend(group)
        self._trim_kept(kept_facts)
        while len(self._facts) > self._bounds.most_facts:
            place, domain = self._facts.popleft()
            runs = self._domains[domain].runs if domain in self._domains else None
            if runs and runs.at[0] == _number(place):
                self._domains[domain].drop_runs(1)
                self._forget_if_empty(domain)

    def _trim_kept(self, added: Sequence[_Placed]) -> None:
        self._kept_places.extend((place, fact.domain) for place, fact in added)
        while len(self._kept_places) > self._bounds.kept_elements:
            _, domain = self._kept_places.popleft()
            self._domains[domain].kept_rows.drop(1)
            self._forget_if_empty(domain)

    def _forget_if_empty(self, domain: str) -> None:
        if not (self._domains[domain].runs or self._domains[domain].kept_rows):
            del self._domains[domain]


class _Rows:
    """Facts as arrays, oldest first: places and those that they rest on as numbers, what they added, and vectors."""

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

    def extend(self, added: Sequence[_Placed]) -> None:
        """Add facts, of which the vectors are copied: each keeps all that was read together with it in memory."""
        if not added:
            return
        if self._first + len(self) + len(added) > len(self._vectors):
            moved = np.empty((2 * (len(self) + len(added)), self._vectors.shape[1]), np.float32)
            moved[: len(self)] = self.vectors
            self._vectors, self._first = moved, 0
        self.trace_ids += [fact.trace_id for _, fact in added]
        self.vectors[-len(added) :] = [fact.vector for _, fact in added]
        self.at = np.concatenate([self.at, [_number(place) for place, _ in added]])
        self.as_of = np.concatenate([self.as_of, [_number(fact.as_of) for _, fact in added]])
        self.adds = np.concatenate([self.adds, [fact.adds for _, fact in added]])

    def drop(self, count: int) -> None:
        """Drop the oldest facts."""
        self._first += count
        del self.trace_ids[:count]
        self.at, self.as_of, self.adds = self.at[count:], self.as_of[count:], self.adds[count:]


class _Domain:
    """The last runs of one domain with their covers, and its kept traces."""

    def __init__(self, dimensions: int, bounds: GateBounds) -> None:
        self._ttl = bounds.kept_ttl_ms * _TICKS
        self.most_runs = bounds.most_runs
        self.runs = _Rows(dimensions)
        self.kept_rows = _Rows(dimensions)
        self._covers = np.empty(0)
        self._covers_at = 0

    def covers(self, at: int) -> NDArray[np.float64]:
        """Return the covers of the runs at a place."""
        return self._covers * self._standing(self._covers_at, at)

    def extend(self, added: Sequence[_Placed]) -> None:
        """Add facts, oldest first."""
        runs, now = added[-self.most_runs :], _number(added[-1][0])
        self.runs.extend(runs)
        recorded = np.array([fact.cover for _, fact in runs])
        since = self.runs.as_of[-len(runs) :]
        self._covers = np.concatenate([self.covers(now), recorded * np.where(since, self._standing(since, now), 1.0)])
        self._covers_at = now
        self.drop_runs(len(self.runs) - self.most_runs)
        self.kept_rows.extend([each for each in added if each[1].is_kept])
        # A run is covered by what was kept since the facts that its decision rests on, too.
        first = int(np.searchsorted(self.kept_rows.at, since.min(), "right"))
        if first < len(self.kept_rows):
            at = self.kept_rows.at[first:]
            raised = self.runs.vectors @ self.kept_rows.vectors[first:].T * self._standing(at, now)
            self._covers = np.maximum(self._covers, np.where(at > self.runs.as_of[:, None], raised, 0.0).max(axis=1))

    def drop_runs(self, count: int) -> None:
        """Drop the oldest runs with their covers; what others are covered by stays."""
        if count > 0:
            self.runs.drop(count)
            self._covers = self._covers[count:]

    def kept_standing(self, at: int) -> NDArray[np.float64]:
        """Return the share of its similarity that each kept trace covers with at a place; 0 once it has expired."""
        return np.where(at - self.kept_rows.at < self._ttl, self._standing(self.kept_rows.at, at), 0.0)

    def demand(self, at: int) -> NDArray[np.float64]:
        """Return the weight of each run at a place."""
        return self._standing(self.runs.at, at)

    def _standing(self, since: NDArray[np.int64] | int, at: int) -> NDArray[np.float64]:
        standing: NDArray[np.float64] = np.exp2(np.minimum((since - at) / (self._ttl / HALF_LIVES), 0.0))
        return standing


def _number(place: Place) -> int:
    """Return a place as a number, in the same order and in proportion to time: Redis gives a millisecond no million places."""
    return place.time_ms * _TICKS + place.number


class Batch:
    """Traces that are weighed one after the other, each also against those before it; others know none before it is stored."""

    def __init__(
        self,
        domains: Mapping[str, _Domain],
        traces: Sequence[tuple[str, str, Vectors]],
        as_of: Place,
        policy: GatePolicy,
    ) -> None:
        # As the vectors will be stored, so that others calculate with the same.
        vectors = np.array([vector for _, _, vector in traces], VECTOR).astype(np.float32)
        by_domain = defaultdict[str, list[int]](list)
        for index, (_, domain, _) in enumerate(traces):
            by_domain[domain].append(index)
        self._turns: dict[int, tuple[_Turns, int]] = {}
        for domain, indices in by_domain.items():
            trace_ids = [traces[index][0] for index in indices]
            of_domain = _Turns(domain, domains[domain], trace_ids, vectors[indices], as_of, policy)
            self._turns.update((index, (of_domain, turn)) for turn, index in enumerate(indices))

    def weigh(self, index: int) -> Weighed:
        """Weigh a trace, once all before it are settled."""
        turns, turn = self._turns[index]
        return turns.weigh(turn)

    def settle(self, index: int, *, is_eligible: bool, is_kept: bool) -> Fact:
        """Note whether a trace could be kept, and is, and return the fact to store."""
        turns, turn = self._turns[index]
        return turns.settle(turn, is_eligible=is_eligible, is_kept=is_kept)


class _Turns:
    """The traces of a batch that are of one domain, each with its turn."""

    def __init__(
        self, name: str, domain: _Domain, trace_ids: Sequence[str], vectors: Vectors, as_of: Place, policy: GatePolicy
    ) -> None:
        self._domain, self._trace_ids, self._vectors, self._as_of, self._policy = name, trace_ids, vectors, as_of, policy
        at, self._runs, self._most_runs = _number(as_of), len(domain.runs), domain.most_runs
        # Each of these is of the runs, and behind them of the traces here.
        self._similarities = np.hstack([vectors @ domain.runs.vectors.T, vectors @ vectors.T])
        self._covers = np.concatenate([domain.covers(at), np.zeros(len(trace_ids))])
        self._adds = np.concatenate([domain.runs.adds, np.zeros(len(trace_ids))])
        own, column = self._runs + np.arange(len(trace_ids))[:, None], np.arange(len(self._adds))
        # A trace counts itself, those before it here, and as many runs as are left of the most.
        self._weights = np.where((column <= own) & (column >= own - self._most_runs), 1.0, 0.0)
        self._weights[:, : self._runs] *= domain.demand(at)
        self._nearest: list[tuple[str, float] | None] = [None] * len(trace_ids)
        if domain.kept_rows:
            to_kept = vectors @ domain.kept_rows.vectors.T
            covering = to_kept * domain.kept_standing(at)
            for turn, best in enumerate(covering.argmax(axis=1)):
                if covering[turn, best] > 0:
                    self._covers[self._runs + turn] = covering[turn, best]
                    self._nearest[turn] = domain.kept_rows.trace_ids[best], float(to_kept[turn, best])
        self._weigh_all()

    def _weigh_all(self) -> None:
        # To itself a trace has a similarity of 1, whatever the rounding of its vector says.
        turns = np.arange(len(self._trace_ids))
        self._similarities[turns, self._runs + turns] = 1.0
        added = (np.maximum(self._similarities - self._covers, 0.0) * self._weights).sum(axis=1)
        # Equal traces must add equally, although the last bits depend on how many are weighed together.
        self._added = added.round(4).tolist()

    def weigh(self, turn: int) -> Weighed:
        own, bar, share = self._runs + turn, self._policy.bar, None
        if bar is None:
            share = self._policy.share
            bar = bar_of(self._adds[max(0, own - self._most_runs) : own], share)
        return Weighed(self._added[turn], bar, share, self._nearest[turn], self._as_of)

    def settle(self, turn: int, *, is_eligible: bool, is_kept: bool) -> Fact:
        own, similarities = self._runs + turn, self._similarities[turn]
        trace_id, adds, cover = self._trace_ids[turn], self._added[turn] if is_eligible else 0.0, min(1.0, self._covers[own])
        self._adds[own] = adds
        if is_kept:
            for later in range(turn + 1, len(self._trace_ids)):
                if (similarity := float(similarities[self._runs + later])) > self._covers[self._runs + later]:
                    self._nearest[later] = trace_id, similarity
            self._covers = np.maximum(self._covers, similarities)
            self._weigh_all()
        return Fact(trace_id, self._domain, self._as_of, turn, float(cover), adds, is_kept, self._vectors[turn])


def bar_of(adds: NDArray[np.float64], share: float) -> float:
    """Return what a trace must add to be among the ``share`` of a domain's last runs, itself among them, that add most."""
    if not len(adds):
        return 1.0
    place = max(len(adds) - math.ceil(share * (len(adds) + 1)), 0)
    return max(float(np.partition(adds, place)[place]), LEAST_BAR)
