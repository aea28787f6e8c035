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
from collections.abc import Sequence

import numpy as np

from kp_scorer.gate.batch import Batch, GatePolicy
from kp_scorer.gate.domain import Domain, GateBounds
from kp_scorer.gate.facts import BEGINNING, Entries, FactLog, Vectors, number_of
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
        return sum(int(np.count_nonzero(domain.kept_rows["vector"].any(axis=1))) for domain in self._domains.values())

    def catch_up(self) -> None:
        """Read the facts to their end. Raises ServiceUnavailable if they cannot be read."""
        erased, is_anew = set[int](), False
        while True:
            tail = self._log.read(self._cursor)
            if tail.restart:
                self._begin()
                continue
            entries = Entries(tail.entries, self._dimensions)
            if entries:
                self._cursor = Place.parse(tail.entries[-1][0].decode())
            if tail.kept_entries:
                # Apply only the earlier ones here: the later ones are in ``tail.entries``, too.
                kept_entries = Entries(tail.kept_entries, self._dimensions)
                first = entries.rows["at"].min(initial=np.iinfo(np.int64).max)
                self._apply(kept_entries, int(np.searchsorted(kept_entries.rows["at"], first)), are_runs=False)
            self._apply(entries, len(entries))
            self._trim(entries)
            erased.update(number_of(note.erased) for note in entries.notes.values() if note.erased)
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

    def _apply(self, entries: Entries, count: int, *, are_runs: bool = True) -> None:
        """Apply the first ``count`` entries in their order. Those between two notes are added together."""
        start = 0
        for index, note in entries.notes.items():
            if index >= count:
                break
            self._extend(entries, start, index, are_runs=are_runs)
            if note.is_late:
                self._extend(entries, index, index + 1, are_runs=False)
            elif note.dropped:
                self._kept_places[number_of(note.place)] = None
                if (domain := self._kept_places.get(number_of(note.dropped))) is not None:
                    self._domains[domain].drop_kept(number_of(note.dropped))
            start = index + 1
        self._extend(entries, start, count, are_runs=are_runs)
        while len(self._kept_places) > self._bounds.kept_elements:
            _, domain = self._kept_places.popitem(last=False)
            if domain is not None:
                self._domains[domain].drop_oldest_kept()
                self._forget_if_empty(domain)

    def _extend(self, entries: Entries, start: int, end: int, *, are_runs: bool) -> None:
        by_domain = defaultdict[str, list[int]](list)
        for index, domain in enumerate(entries.domains[start:end], start):
            by_domain[domain].append(index)
        by_domain.pop("", None)
        kept_indices = {start + index for index in np.flatnonzero(entries.rows["is_kept"][start:end]).tolist()}
        for domain, indices in by_domain.items():
            kept_ids = [entries.trace_id(index) for index in indices if index in kept_indices]
            self._domains[domain].extend(entries.rows.take(indices), kept_ids, are_runs=are_runs)
        for index in sorted(kept_indices):
            self._kept_places[entries.rows["at"].item(index)] = entries.domains[index]

    def _trim(self, entries: Entries) -> None:
        """Note the places of new entries, and forget the runs that the log has dropped to make room for them."""
        self._facts.extend(zip(entries.rows["at"].tolist(), entries.domains, strict=True))
        dropped = [self._facts.popleft() for _ in range(len(self._facts) - self._bounds.most_facts)]
        for domain in {domain for _, domain in dropped if domain in self._domains}:
            self._domains[domain].drop_runs(dropped[-1][0])
            self._forget_if_empty(domain)

    def _forget_if_empty(self, domain: str) -> None:
        if not (self._domains[domain].runs or self._domains[domain].kept_rows):
            del self._domains[domain]
