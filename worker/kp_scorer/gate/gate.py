"""The gate accepts traces one at a time, each for what it adds to the kept traces of its domain.

The cover of a run is its largest similarity to a kept trace. A trace adds the amount by which keeping it would raise its own
cover and those of the last runs of its domain (``coverage.py`` does the same for a set). It is accepted if that amount reaches
the bar of its domain. The bar follows the share of runs to accept: it is the amount that this share of the last runs reached
when they were decided. Demand and covers fade with age, so that a trace that was kept long ago does not keep out runs of the
same kind that users ask for today.

Each decision leaves a fact for later ones: its vector, its cover, and whether its trace is kept. Facts are stored in the step
that stores the decision, so all workers see them in one order. A decision rests on the facts up to one that it names, and on
its mates: the facts of its domain that the same step stores right before its own. So no worker waits for another, the facts
alone determine which traces are kept, and an audit can recompute every decision.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from kp_scorer.gate.batch import Batch, GatePolicy
from kp_scorer.gate.domain import Domain, GateBounds, PlacedFact, number_of
from kp_scorer.gate.facts import BEGINNING, FactLog, StoredFact, Vectors
from kp_scorer.novelty.log import Place


class Gate:
    """This process's view of the facts: the runs, the kept traces and the bar of each domain. One thread owns it."""

    def __init__(self, log: FactLog, dimensions: int, bounds: GateBounds, policy: GatePolicy) -> None:
        self._log = log
        self._dimensions = dimensions
        self._bounds = bounds
        self.policy = policy
        self._begin()

    def _begin(self) -> None:
        self._domains: defaultdict[str, Domain] = defaultdict(lambda: Domain(self._dimensions, self._bounds))
        # The places that the log still holds, and their domains. The garbage collector skips pairs of a number and a text,
        # whereas it would visit ten thousand instances of Place in each collection.
        self._facts = deque[tuple[int, str]]()
        self._kept_places = OrderedDict[int, str | None]()  # The domain of each kept trace; None for a note.
        self._cursor: Place | None = None

    @property
    def kept_count(self) -> int:
        """The number of kept traces."""
        return sum(int(np.count_nonzero(domain.kept_rows.vectors.any(axis=1))) for domain in self._domains.values())

    def catch_up(self) -> None:
        """Read the facts to their end. Raises ServiceUnavailable if they cannot be read."""
        erased, is_anew = set[int](), False
        while True:
            tail = self._log.read(self._cursor)
            if tail.restart:
                self._begin()
                continue
            # Apply only the earlier kept facts here: the later ones are in ``tail.facts``, too.
            earlier = [each for each in tail.kept_facts if not tail.facts or each.place < tail.facts[0].place]
            self._apply(earlier, are_runs=False)
            self._apply(tail.facts)
            self._trim(tail.facts)
            erased.update(number_of(stored.erased) for stored in tail.facts if stored.erased)
            if tail.more:
                continue
            if is_anew or not erased or erased.isdisjoint((*self._kept_places, *(place for place, _ in self._facts))):
                return
            # The effects of an erased fact on others cannot be undone one by one, so read all facts anew. Do so only once:
            # a note may be false, and then this would never end.
            self._begin()
            is_anew = True

    def weigh(self, traces: Sequence[tuple[str, str, Vectors]]) -> "Batch":
        """Return a batch that weighs traces, each an id, a domain and a vector, against the facts and the traces before it."""
        return Batch(self._domains, traces, self._cursor or BEGINNING, self.policy)

    def _apply(self, entries: Sequence[StoredFact], *, are_runs: bool = True) -> None:
        """Apply entries in their order. Those between two notes are added together."""
        by_domain = defaultdict[str, tuple[list[PlacedFact], list[PlacedFact]]](lambda: ([], []))
        for place, fact, is_late, dropped, _ in entries:
            if dropped:
                self._extend(by_domain)
                by_domain.clear()
                self._kept_places[number_of(place)] = None
                if (domain := self._kept_places.get(number_of(dropped))) is not None:
                    self._domains[domain].drop_kept(number_of(dropped))
            elif fact and fact.vector.shape == (self._dimensions,):
                runs, kept_facts = by_domain[fact.domain]
                runs += [(place, fact)] * (are_runs and not is_late)
                if fact.is_kept:
                    kept_facts.append((place, fact))
                    self._kept_places[number_of(place)] = fact.domain
        self._extend(by_domain)
        while len(self._kept_places) > self._bounds.kept_elements:
            _, domain = self._kept_places.popitem(last=False)
            if domain is not None:
                self._domains[domain].kept_rows.drop(1)
                self._forget_if_empty(domain)

    def _extend(self, by_domain: Mapping[str, tuple[Sequence[PlacedFact], Sequence[PlacedFact]]]) -> None:
        for domain, (runs, kept_facts) in by_domain.items():
            if runs or kept_facts:
                self._domains[domain].extend(runs, kept_facts)

    def _trim(self, facts: Sequence[StoredFact]) -> None:
        """Note the places of new facts, and forget the facts that the log has dropped to make room for them."""
        for place, fact, *_ in facts:
            self._cursor = place
            self._facts.append((number_of(place), fact.domain if fact else ""))
        while len(self._facts) > self._bounds.most_facts:
            number, domain = self._facts.popleft()
            runs = self._domains[domain].runs if domain in self._domains else None
            if runs and runs.at[0] == number:
                self._domains[domain].drop_runs(1)
                self._forget_if_empty(domain)

    def _forget_if_empty(self, domain: str) -> None:
        if not (self._domains[domain].runs or self._domains[domain].kept_rows):
            del self._domains[domain]
