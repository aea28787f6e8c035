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

from collections import defaultdict, deque
from collections.abc import Sequence

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
        # The places that the log holds, as it is trimmed, and their domains. The garbage collector passes over pairs of a
        # number and a text, where it would visit ten thousand instances of Place in each collection.
        self._facts = deque[tuple[int, str]]()
        self._kept_places = deque[tuple[int, str]]()
        self._cursor: Place | None = None

    def catch_up(self) -> int:
        """Read the facts to their end, and return the number of kept traces.

        Raises ServiceUnavailable if they cannot be read.
        """
        erased, is_anew = set[int](), False
        while True:
            tail = self._log.read(self._cursor)
            if tail.restart:
                self._begin()
                continue
            # Later ones are among the facts, too.
            self._keep([each for each in tail.kept_facts if not tail.facts or each.place < tail.facts[0].place])
            self._apply(tail.facts)
            erased.update(number_of(stored.erased) for stored in tail.facts if stored.erased)
            if tail.more:
                continue
            if is_anew or not erased or erased.isdisjoint(place for place, _ in (*self._facts, *self._kept_places)):
                return len(self._kept_places)
            # The effects of an erased fact on others cannot be undone one by one, so read all anew; but only once, as
            # a note may be false, and this must end.
            self._begin()
            is_anew = True

    def weigh(self, traces: Sequence[tuple[str, str, Vectors]]) -> "Batch":
        """Return a batch that weighs traces, each an id, a domain and a vector, against what was read and those before it."""
        return Batch(self._domains, traces, self._cursor or BEGINNING, self.policy)

    def _keep(self, earlier: Sequence[StoredFact]) -> None:
        by_domain = defaultdict[str, list[PlacedFact]](list)
        kept_facts = [(place, fact) for place, fact, _ in earlier if fact and fact.vector.shape == (self._dimensions,)]
        for place, fact in kept_facts:
            by_domain[fact.domain].append((place, fact))
        for domain, group in by_domain.items():
            self._domains[domain].kept_rows.extend(group)
        self._trim_kept(kept_facts)

    def _apply(self, tail: Sequence[StoredFact]) -> None:
        by_domain = defaultdict[str, list[PlacedFact]](list)
        kept_facts: list[PlacedFact] = []
        for place, fact, _ in tail:
            self._cursor, domain = place, ""
            if fact and fact.vector.shape == (self._dimensions,):
                domain = fact.domain
                by_domain[domain].append((place, fact))
                kept_facts += [(place, fact)] * fact.is_kept
            self._facts.append((number_of(place), domain))
        for domain, group in by_domain.items():
            self._domains[domain].extend(group)
        self._trim_kept(kept_facts)
        while len(self._facts) > self._bounds.most_facts:
            number, domain = self._facts.popleft()
            runs = self._domains[domain].runs if domain in self._domains else None
            if runs and runs.at[0] == number:
                self._domains[domain].drop_runs(1)
                self._forget_if_empty(domain)

    def _trim_kept(self, added: Sequence[PlacedFact]) -> None:
        self._kept_places.extend((number_of(place), fact.domain) for place, fact in added)
        while len(self._kept_places) > self._bounds.kept_elements:
            _, domain = self._kept_places.popleft()
            self._domains[domain].kept_rows.drop(1)
            self._forget_if_empty(domain)

    def _forget_if_empty(self, domain: str) -> None:
        if not (self._domains[domain].runs or self._domains[domain].kept_rows):
            del self._domains[domain]
