"""Choosing a set from files for ``kp-scorer keep --best``: what is read waits on disk until all of it is known."""

import json
import tempfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kp_scorer.cli.display import cell, console, progress
from kp_scorer.coverage import BATCH, NOTHING, Coverage, StandIn, Vectors, apportioned
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.trace import ReasoningTrace

_NEAR_COPY: Final = 0.7
"""The similarity by words from which people take one run for another one of the same task, done in the same way."""
_COMPARED: Final = 512  # Runs that are compared with all kept ones at once: with 10,000 of these their similarities take 20 MB.
_QUICK: Final = 1  # Of zlib's levels. What is read waits for seconds.

Ints = NDArray[np.intp]


class DomainSummary(NamedTuple):
    """The numbers of one domain's runs: in all, kept and left out."""

    domain: str
    runs: int
    eligible: int  # Runs that may be kept: they succeeded, and no check keeps them back.
    kept: int
    near_copies: int  # Eligible runs that were left out, each much like a kept one.
    objectives: int  # Different ones.
    solved: int  # Those of them of which a run is eligible.
    covered: int  # Those of them of which a run is kept.


class Verdict(NamedTuple):
    """Why one run is kept or not, as a row of ``--why``."""

    trace_id: str
    domain: str
    eligible: bool
    kept: bool
    adds: float | None  # Of a kept run: by how much it raised the covers of its batch.
    stands_for: int | None  # Of a kept run: how many others are most like it.
    nearest: str | None  # Of a kept run the most similar of these; of another run the kept one that stands for it.
    similarity: float | None  # To the nearest.

    def row(self) -> dict[str, Any]:
        """Return the verdict as an object for JSON, its figures rounded to four digits."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in self._asdict().items()}


class EarlierRun(NamedTuple):
    """A run that was kept before."""

    trace_id: str
    vector: Vectors  # Of shape (1, dimensions).


class Candidates:
    """All runs of an input with their vectors. Documents and vectors are in temporary files, some 100 bytes a run in memory."""

    def __init__(self) -> None:
        with ExitStack() as files:
            self._documents = files.enter_context(tempfile.TemporaryFile())
            self._vectors = files.enter_context(tempfile.TemporaryFile())
            self._files = files.pop_all()
        self._embedder = WordsEmbedder()
        self._offsets = array("q", [0])
        self._domains = array("l")
        self._objectives = array("q")
        self._eligible = array("b")
        self._numbers: dict[str, int] = {}
        self._ids: set[int] = set()
        self._earlier: dict[str, list[EarlierRun]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __len__(self) -> int:
        """Return how many runs there are."""
        return len(self._objectives)

    def add_earlier(self, trace: ReasoningTrace) -> None:
        """Add a run that was kept before, which stands for runs of its domain and is no candidate any more."""
        self._ids.add(hash(trace.id))
        self._earlier.setdefault(trace.metadata.task_domain, []).append(EarlierRun(trace.id, self._vector(trace)))

    def add(self, trace: ReasoningTrace, document: Mapping[str, Any], eligible: bool) -> None:
        """Add a run, unless one with its id is there."""
        hashed = hash(trace.id)
        if hashed in self._ids:
            return
        self._ids.add(hashed)
        # Only a run that may be kept is ever written out.
        packed = zlib.compress(json.dumps([trace.id, dict(document) if eligible else None]).encode(), _QUICK)
        self._documents.write(packed)
        self._offsets.append(self._offsets[-1] + len(packed))
        self._vectors.write(self._vector(trace).tobytes())
        self._domains.append(self._numbers.setdefault(trace.metadata.task_domain, len(self._numbers)))
        self._objectives.append(hash(trace.task.objective))
        self._eligible.append(eligible)

    def earlier(self, domain: str) -> tuple[list[str], Vectors]:
        """Return the ids of a domain's runs that were kept before, and their vectors, of shape (runs, dimensions)."""
        runs = self._earlier.get(domain, [])
        vectors = np.concatenate([np.empty((0, self._embedder.dimensions), np.float32), *(run.vector for run in runs)])
        return [run.trace_id for run in runs], vectors

    def by_domain(self) -> dict[str, Ints]:
        """Return the places of each domain's runs, in the order of the input."""
        numbers = np.asarray(self._domains)
        return {name: np.flatnonzero(numbers == number) for name, number in self._numbers.items()}

    def eligible(self, places: Ints) -> NDArray[np.bool_]:
        """Return for each of these runs whether it may be kept."""
        return np.asarray(self._eligible, np.bool_)[places]

    def objectives(self, places: Ints) -> set[int]:
        """Return the different objectives of these runs, as a hash of each."""
        return set(np.asarray(self._objectives)[places].tolist())

    def vectors(self, places: Ints) -> Vectors:
        """Read the vectors of these runs, of shape (runs, dimensions)."""
        self._vectors.flush()
        rows = np.memmap(self._vectors, np.float32, "r").reshape(-1, self._embedder.dimensions)
        return np.array(rows[places])

    def read(self, place: int) -> tuple[str, dict[str, Any]]:
        """Read the id of a run and, if it may be kept, its document."""
        self._documents.seek(self._offsets[place])
        packed = self._documents.read(self._offsets[place + 1] - self._offsets[place])
        trace_id, document = json.loads(zlib.decompress(packed))
        return trace_id, document

    def _vector(self, trace: ReasoningTrace) -> Vectors:
        return self._embedder.embed([self._embedder.recipe.text(trace)])


class Choice:
    """The runs of one domain that are kept, and which of them stands for each of the others.

    Where runs were kept before, a run is kept only if it adds more than a near copy of these would.
    """

    def __init__(self, candidates: Candidates, domain: str, places: Ints, most: int) -> None:
        """Choose up to ``most`` of the runs at these places, batch after batch in their order."""
        self._candidates, self._domain, self._places = candidates, domain, places
        self._earlier_ids, earlier = candidates.earlier(domain)
        self._coverage = Coverage(earlier)
        least = 1 - _NEAR_COPY if len(earlier) else NOTHING
        self.kept_places: list[int] = []  # Their places, as they were chosen.
        self._adds: list[float] = []
        for first in range(0, len(places), BATCH):
            batch = places[first : first + BATCH]
            so_far = round(most * (first + len(batch)) / len(places))
            eligible = candidates.eligible(batch)
            left = so_far - len(self.kept_places)
            for chosen in self._coverage.choose(candidates.vectors(batch), eligible.tolist(), left, least):
                self.kept_places.append(int(batch[chosen.place]))
                self._adds.append(chosen.adds)
        self._others = np.setdiff1d(places, np.array(self.kept_places, np.intp))
        self._stand_ins = list(self._found_stand_ins())

    def summary(self) -> DomainSummary:
        """Count what came of the domain's runs."""
        candidates, places = self._candidates, self._places
        eligible = places[candidates.eligible(places)]
        kept_places = np.array(self.kept_places, np.intp)
        pairs = zip(candidates.eligible(self._others), self._stand_ins, strict=False)
        near_copies = sum(bool(is_eligible) and stand_in.similarity >= _NEAR_COPY for is_eligible, stand_in in pairs)
        objectives, solved, covered = (len(candidates.objectives(each)) for each in (places, eligible, kept_places))
        counts = len(places), len(eligible), len(kept_places)
        return DomainSummary(self._domain, *counts, near_copies, objectives, solved, covered)

    def verdicts(self) -> Iterator[Verdict]:
        """Say of each run why it is kept or not: first of the kept ones as they were chosen, then of the others in order."""
        others = self._others
        stands_for = Counter[int]()
        nearest: dict[int, tuple[float, int]] = {}
        for place, stand_in in zip(others.tolist(), self._stand_ins, strict=False):
            stands_for[stand_in.number] += 1
            nearest[stand_in.number] = max(nearest.get(stand_in.number, (-1.0, 0)), (stand_in.similarity, place))
        for number, (place, adds) in enumerate(zip(self.kept_places, self._adds, strict=True), len(self._earlier_ids)):
            similarity, place_of_nearest = nearest.get(number, (None, None))
            other_id = None if place_of_nearest is None else self._id(place_of_nearest)
            yield Verdict(self._id(place), self._domain, True, True, adds, stands_for[number], other_id, similarity)
        kept_ids = [*self._earlier_ids, *map(self._id, self.kept_places)]
        stand_ins = iter(self._stand_ins)
        for place, eligible in zip(others.tolist(), self._candidates.eligible(others).tolist(), strict=True):
            nearest_kept = next(stand_ins, None)
            kept_id = kept_ids[nearest_kept.number] if nearest_kept else None
            similarity = nearest_kept.similarity if nearest_kept else None
            yield Verdict(self._id(place), self._domain, eligible, False, None, None, kept_id, similarity)

    def _found_stand_ins(self) -> Iterator[StandIn]:
        """Find the stand-in of each run that is not kept; of none where nothing is kept."""
        for first in range(0, len(self._others), _COMPARED):
            yield from self._coverage.stand_ins(self._candidates.vectors(self._others[first : first + _COMPARED]))

    def _id(self, place: int) -> str:
        return self._candidates.read(place)[0]


def choices(candidates: Candidates, best: float | int) -> Iterator[Choice]:
    """Choose of each domain, in the order in which domains first appear: a share of all runs, or a number of them."""
    domains = candidates.by_domain()
    sizes = [len(places) for places in domains.values()]
    most = round(best * len(candidates)) if isinstance(best, float) else best
    done = 0
    with progress("chosen from") as advance:
        for (domain, places), share in zip(domains.items(), apportioned(sizes, most), strict=True):
            yield Choice(candidates, domain, places, share)
            done += len(places)
            advance(done, len(candidates))


def print_summaries(summaries: Iterable[DomainSummary]) -> None:
    """Print the summaries to stderr, as a table."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in DomainSummary._fields:
        table.add_column(heading.replace("_", " "), justify="left" if heading == "domain" else "right")
    for domain, *figures in summaries:
        table.add_row(cell(domain), *map(str, figures))
    console().print(table)
