"""Recomputes from the facts, by the definition, the amount that each trace added, and compares it with the decisions."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kp_scorer.decision import Decision, GateResult
from kp_scorer.gate.batch import bar_of
from kp_scorer.gate.domain import HALF_LIVES, GateBounds
from kp_scorer.gate.facts import BEGINNING, Fact, StoredFact, Vectors
from kp_scorer.novelty.log import Place
from kp_scorer.novelty.verification import Decisions

_Stored = tuple[Place, Fact]
_AT: Final = itemgetter(0)

TOLERANCE: Final = 1e-3  # A smaller difference is rounding, summed over the runs of a domain.


@dataclass(slots=True)
class GateReport:
    """The result of an audit of the facts of one space. Every fact counts in exactly one of the numbers."""

    agreeing: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)
    undecided: int = 0  # Facts without their decision, which has expired or was erased.
    beyond: int = 0  # Facts that rest on facts that are no longer stored.


def audit_gate(
    facts: Sequence[StoredFact], kept_facts: Sequence[StoredFact], decisions: Decisions, bounds: GateBounds
) -> GateReport:
    """Compare the decisions with figures from the facts; ``facts`` and ``kept_facts`` are all stored ones, oldest first."""
    report, replay = GateReport(), _Replay(facts, kept_facts, bounds)
    decided = decisions([fact.trace_id for _, fact in replay.facts])
    for stored, trace in zip(replay.facts, decided, strict=True):
        # A fact belongs to the first decision on its trace, not to a revision.
        decision, basis = (trace.first or trace.decision) if trace else None, replay.basis(*stored)
        if decision is None or decision.gate is None or decision.gate.as_of != str(stored[1].as_of):
            report.undecided += 1
        elif not (rows := list(_differences(stored[1], decision, decision.gate, basis))):
            report.agreeing += 1
        elif basis.is_complete or all(row["gate"] in ("outcome", "kept") for row in rows):
            report.differences += rows
        else:
            report.beyond += 1
    return report


class _KeptTrace(NamedTuple):
    """A trace that is kept from a place on, and perhaps dropped at a later one."""

    at: Place
    vector: Vectors
    dropped_at: Place | None

    def is_dropped(self, by: Place) -> bool:
        """Return whether the trace was dropped at a place or earlier."""
        return self.dropped_at is not None and self.dropped_at <= by


class _Basis(NamedTuple):
    """The figures of a decision, recomputed from the facts that are still stored."""

    adds: float
    earlier_adds: NDArray[np.float64]
    is_complete: bool


class _Replay:
    """Goes through the facts in order, and recomputes the basis of each decision."""

    def __init__(self, facts: Sequence[StoredFact], kept_facts: Sequence[StoredFact], bounds: GateBounds) -> None:
        self._bounds = bounds
        self.facts = [(each.place, each.fact) for each in facts if each.fact and not each.is_late]
        self._places = {each.place for each in facts}
        # Where facts were trimmed, erased or lost, others may rest on facts that are gone.
        self._is_complete = len(facts) < bounds.most_facts and len(kept_facts) < bounds.kept_elements
        self._is_complete &= all(each.fact or each.dropped for each in facts)
        self._of_domain = defaultdict[str, list[_Stored]](list)
        self._kept_traces = defaultdict[str, list[_KeptTrace]](list)
        earlier = [each for each in kept_facts if facts and each.place < facts[0].place]
        dropped = {each.dropped: each.place for each in (*earlier, *facts) if each.dropped}
        for place, fact, *_ in (*earlier, *facts):
            if fact and fact.is_kept:
                self._kept_traces[fact.domain].append(_KeptTrace(place, fact.vector, dropped.get(place)))

    def basis(self, place: Place, fact: Fact) -> _Basis:
        """Recompute the basis of the decision that left a fact at a place. Call this for all facts in their order."""
        before = self._of_domain[fact.domain]
        others = before[: len(before) - fact.mates]
        mates = before[len(others) :]
        runs = (others[: bisect_right(others, fact.as_of, key=_AT)] + mates)[-self._bounds.most_runs :]
        kept_traces = self._kept_among(fact, mates[0][0] if mates else place, place)
        before.append((place, fact))
        # Use the lifetime that the fact records, whatever the setting is now.
        now_ms, kept_ttl_ms = fact.as_of.time_ms, fact.kept_ttl_ms

        def aged(since_ms: int) -> float:
            return float(2.0 ** min(0.0, (since_ms - now_ms) / kept_ttl_ms * HALF_LIVES))

        def standing(since_ms: int) -> float:
            return aged(since_ms) if now_ms - since_ms < kept_ttl_ms else 0.0

        covering = (each for each in kept_traces if not each.is_dropped(fact.as_of))
        own = max([float(each.vector @ fact.vector) * standing(each.at.time_ms) for each in covering], default=0.0)
        adds = max(0.0, 1.0 - max(0.0, own))
        for at, run in runs:
            cover = run.cover * aged(run.as_of.time_ms or at.time_ms)
            later = (each for each in kept_traces[bisect_right(kept_traces, run.as_of, key=_AT) :] if not each.is_dropped(at))
            cover = max([cover, *(float(each.vector @ run.vector) * aged(each.at.time_ms) for each in later)])
            adds += max(0.0, float(run.vector @ fact.vector) - cover) * standing(at.time_ms)
        is_complete = self._is_complete and (fact.as_of == BEGINNING or fact.as_of in self._places)
        return _Basis(adds, np.array([each.adds for _, each in runs]), is_complete)

    def _kept_among(self, fact: Fact, mates: Place, end: Place) -> list[_KeptTrace]:
        """Return the traces kept up to the fact that a decision rests on, and among its mates, from ``mates`` to ``end``."""
        kept_traces = self._kept_traces[fact.domain]
        own = slice(bisect_left(kept_traces, mates, key=_AT), bisect_left(kept_traces, end, key=_AT))
        return kept_traces[: bisect_right(kept_traces, fact.as_of, key=_AT)] + kept_traces[own]


def _differences(fact: Fact, decision: Decision, gate: GateResult, basis: _Basis) -> Iterator[dict[str, Any]]:
    bar = gate.bar if gate.share is None else bar_of(basis.earlier_adds, gate.share)
    expected = (basis.adds, bar) if gate.eligible and not decision.is_guarded else (0.0, bar)
    is_accepted = decision.outcome == "accepted"
    rows = {
        "adds": (gate.adds, basis.adds),
        "fact": (fact.adds, expected[0]),
        "bar": (gate.bar, bar),
        "outcome": (float(is_accepted), float(gate.accepts and not decision.is_guarded)),
        "kept": (float(fact.is_kept), float(is_accepted)),
    }
    for name, (decided, recomputed) in rows.items():
        if abs(decided - recomputed) > TOLERANCE:
            yield {"trace_id": decision.trace_id, "gate": name, "decided": decided, "recomputed": recomputed}
