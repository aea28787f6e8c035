"""Weighs the traces of a batch, one after the other: what each adds, and the bar that it must reach."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.decision import GateResult, Nearest
from kp_scorer.gate.domain import Domain
from kp_scorer.gate.facts import Fact, Vectors, number_of, rounded
from kp_scorer.novelty.log import Place

LEAST_BAR: Final = 0.05  # The lowest bar, however large the share; a copy of a kept trace adds less.

Requirement = Literal["success"] | float


class GatePolicy(NamedTuple):
    """Determines which traces the gate accepts."""

    share: float  # The share of a domain's traces to accept, which its bar follows.
    bar: float | None = None  # A fixed bar, in place of one that follows the share.
    requires: Requirement = "success"  # "success", or else the least outcome dimension.

    def admits(self, success: bool, outcome_confidence: float) -> bool:
        """Return whether a trace meets the requirement."""
        return success if self.requires == "success" else outcome_confidence >= self.requires


class Batch:
    """Traces that are weighed in order, each also against those before it. Other workers see a trace only once it is stored."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        traces: Sequence[tuple[str, str, Vectors]],
        as_of: Place,
        policy: GatePolicy,
    ) -> None:
        # Round the vectors as they will be stored, so that all workers calculate with the same ones.
        vectors = rounded(np.array([vector for _, _, vector in traces], np.float32))
        by_domain = defaultdict[str, list[int]](list)
        for index, (_, domain, _) in enumerate(traces):
            by_domain[domain].append(index)
        self._turns: dict[int, tuple[_Turns, int]] = {}
        for domain, indices in by_domain.items():
            trace_ids = [traces[index][0] for index in indices]
            of_domain = _Turns(domain, domains[domain], trace_ids, vectors[indices], as_of, policy)
            self._turns.update((index, (of_domain, turn)) for turn, index in enumerate(indices))

    def weigh(self, index: int, success: bool, outcome_confidence: float) -> GateResult:
        """Weigh the trace at an index; all traces before it must have been settled."""
        turns, turn = self._turns[index]
        return turns.weigh(turn, success, outcome_confidence)

    def settle(self, index: int, *, is_eligible: bool, is_kept: bool) -> Fact:
        """Settle the trace at an index, which could be kept if it ``is_eligible``; return the fact to store."""
        turns, turn = self._turns[index]
        return turns.settle(turn, is_eligible=is_eligible, is_kept=is_kept)


class _Turns:
    """The traces of a batch that belong to one domain. A trace's turn is its index among them."""

    def __init__(
        self, name: str, domain: Domain, trace_ids: Sequence[str], vectors: Vectors, as_of: Place, policy: GatePolicy
    ) -> None:
        self._domain, self._trace_ids, self._vectors, self._as_of, self._policy = name, trace_ids, vectors, as_of, policy
        at, self._runs, self._most_runs = number_of(as_of), len(domain.runs), domain.most_runs
        self._kept_ttl_ms = domain.kept_ttl_ms
        # The last axis of each array has the earlier runs first, then the traces of this batch.
        self._similarities = np.hstack([vectors @ domain.runs["vector"].T, vectors @ vectors.T])
        self._covers = np.concatenate([domain.covers(at), np.zeros(len(trace_ids))])
        self._adds = np.concatenate([domain.runs["adds"], np.zeros(len(trace_ids))])
        # A trace counts itself, the traces before it in the batch, and the newest runs, up to the limit on runs.
        turns = np.arange(len(trace_ids))
        before = self._runs + turns[:, None] - np.arange(len(self._adds))
        demand = np.concatenate([domain.weights(domain.runs, at), np.ones(len(trace_ids))])
        self._weights = np.where((before >= 0) & (before <= self._most_runs), demand, 0.0)
        # A trace has a similarity of exactly 1 to itself, despite the rounding of its vector.
        self._similarities[turns, self._runs + turns] = 1.0
        self._nearest: list[tuple[str, float] | None] = [None] * len(trace_ids)
        if domain.kept_rows:
            to_kept = vectors @ domain.kept_rows["vector"].T
            covering = to_kept * domain.weights(domain.kept_rows, at)
            for turn, best in enumerate(covering.argmax(axis=1)):
                if covering[turn, best] > 0:
                    self._covers[self._runs + turn] = covering[turn, best]
                    self._nearest[turn] = domain.kept_ids[best], float(to_kept[turn, best])
        self._added: list[float] = []
        self._weigh_from(0)

    def _weigh_from(self, turn: int) -> None:
        added = (np.maximum(self._similarities[turn:] - self._covers, 0.0) * self._weights[turn:]).sum(axis=1)
        # Round: equal traces must add equally, although the last bits depend on how many are weighed together.
        self._added[turn:] = added.round(4).tolist()

    def weigh(self, turn: int, success: bool, outcome_confidence: float) -> GateResult:
        own, bar, share = self._runs + turn, self._policy.bar, None
        if bar is None:
            share = self._policy.share
            bar = bar_of(self._adds[max(0, own - self._most_runs) : own], share)
        eligible, named = self._policy.admits(success, outcome_confidence), self._nearest[turn]
        nearest = Nearest(trace_id=named[0], similarity=min(1.0, named[1])) if named else None
        adds, as_of = self._added[turn], str(self._as_of)
        return GateResult(adds=adds, bar=bar, share=share, eligible=eligible, nearest=nearest, as_of=as_of)

    def settle(self, turn: int, *, is_eligible: bool, is_kept: bool) -> Fact:
        own, similarities = self._runs + turn, self._similarities[turn]
        trace_id, adds, cover = self._trace_ids[turn], self._added[turn] if is_eligible else 0.0, min(1.0, self._covers[own])
        self._adds[own] = adds
        if is_kept:
            for later in np.flatnonzero(similarities[self._runs :] > self._covers[self._runs :]).tolist():
                self._nearest[later] = trace_id, float(similarities[self._runs + later])
            np.maximum(self._covers, similarities, out=self._covers)
            self._weigh_from(turn + 1)
        follows = trace_id, self._domain, self._as_of, float(cover), adds, self._kept_ttl_ms, turn, is_kept
        return Fact(*follows, self._vectors[turn])


def bar_of(adds: NDArray[np.float64], share: float) -> float:
    """Return the amount that a trace must add to rank in the top ``share`` of itself and a domain's last runs.

    ``adds`` has the amount that each of these runs added, of shape (runs,).
    """
    if not len(adds):
        return 1.0
    place = max(len(adds) - math.ceil(share * (len(adds) + 1)), 0)
    return max(float(np.partition(adds, place)[place]), LEAST_BAR)
