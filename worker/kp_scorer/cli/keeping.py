"""Chooses a set among candidates for ``kp-scorer keep --best``, domain by domain."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kp_scorer.cli.candidates import Candidates, Ints
from kp_scorer.cli.display import cell, console, progress
from kp_scorer.coverage import BATCH, NOTHING, Coverage, StandIn, apportioned

_NEAR_COPY: Final = 0.7
"""The similarity by words from which people take two runs for the same task, done in the same way."""
# The runs that are compared with all kept ones at once: with 10,000 of these, their similarities take 20 MB.
_COMPARED: Final = 512

Rank = Literal["coverage", "score"]


class DomainSummary(NamedTuple):
    """The numbers of one domain's runs: in all, kept and left out."""

    domain: str
    runs: int
    eligible: int  # Runs that may be kept: they succeeded, and no check keeps them back.
    kept: int
    near_copies: int  # Eligible runs that were left out because a kept one is much like them.
    tasks: int | str  # The number of different tasks; empty, like the next three, if the input has none.
    always: int | str  # The number of tasks of which every run is eligible, so that there is little to learn.
    never: int | str  # The number of tasks of which no run is.
    covered: int | str  # The number of tasks with a kept run.


class Verdict(NamedTuple):
    """The reason why one run is kept or not, as a row of ``--why``."""

    trace_id: str
    domain: str
    eligible: bool
    kept: bool
    adds: float | None  # For a run kept for coverage: the amount by which it raised the covers of its batch.
    stands_for: int | None  # For a kept run: the number of other runs that are most like it.
    nearest: str | None  # For a kept run, the most similar of these; for another run, the kept one that stands for it.
    similarity: float | None  # The similarity to ``nearest``.
    file: str  # The file of the run; empty if no file was read.
    line: int

    def row(self) -> dict[str, Any]:
        """Return the verdict as an object for JSON, its figures rounded to four digits."""
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in self._asdict().items()}


class Choice:
    """The runs of one domain that are kept, and for each other run the kept one that stands for it.

    If runs were kept before, a run is kept only if it adds more than a near copy of these would.
    """

    def __init__(
        self, candidates: Candidates, domain: str, places: Ints, most: int, rank: Rank, most_by_task: float = math.inf
    ) -> None:
        """Choose up to ``most`` of the runs at these places, batch after batch in their order, or the highest scores."""
        self._candidates, self._domain, self._places = candidates, domain, places
        self._earlier_ids, earlier = candidates.earlier(domain)
        self._coverage = Coverage(earlier)
        self.kept_places: list[int] = []  # In the order in which they were chosen.
        self._adds: list[float | None] = []
        eligible = candidates.eligible(places)
        self.had_room = most >= eligible.sum()  # True if there was room for every run that may be kept.
        if rank == "score":
            self._keep_highest(places[eligible], most, most_by_task)
        else:
            self._keep_covering(places, most, 1 - _NEAR_COPY if len(earlier) else NOTHING, most_by_task)
        self._others = np.setdiff1d(places, np.array(self.kept_places, np.intp))
        self._stand_ins = list(self._found_stand_ins())

    def _keep_highest(self, eligible: Ints, most: int, most_by_task: float) -> None:
        highest, by_task = self._candidates.by_score(eligible), Counter[int]()
        places = list[int]()
        for place, task in zip(highest.tolist(), self._candidates.task_of(highest), strict=True):
            by_task[task] += 1
            if by_task[task] <= most_by_task and len(places) < most:
                places.append(place)
        highest = np.array(places, np.intp)
        self._coverage.keep(self._candidates.vectors(highest))
        self.kept_places, self._adds = highest.tolist(), [None] * len(highest)

    def _keep_covering(self, places: Ints, most: int, least: float, most_by_task: float) -> None:
        candidates = self._candidates
        for first in range(0, len(places), BATCH):
            batch = places[first : first + BATCH]
            left = round(most * (first + len(batch)) / len(places)) - len(self.kept_places)
            eligible = candidates.eligible(batch).tolist()
            tasks = candidates.task_of(batch) if candidates.has_tasks else None
            for chosen in self._coverage.choose(candidates.vectors(batch), eligible, left, least, tasks, most_by_task):
                self.kept_places.append(int(batch[chosen.place]))
                self._adds.append(chosen.adds)

    def summary(self) -> DomainSummary:
        """Count the domain's runs by what became of them."""
        candidates, places = self._candidates, self._places
        eligible = places[candidates.eligible(places)]
        kept_places = np.array(self.kept_places, np.intp)
        pairs = zip(candidates.eligible(self._others), self._stand_ins, strict=False)
        near_copies = sum(bool(is_eligible) and stand_in.similarity >= _NEAR_COPY for is_eligible, stand_in in pairs)
        numbers = len(places), len(eligible), len(kept_places), near_copies
        if not candidates.has_tasks:
            return DomainSummary(self._domain, *numbers, "", "", "", "")
        tried, solved, failed, covered = map(candidates.tasks, (places, eligible, np.setdiff1d(places, eligible), kept_places))
        return DomainSummary(self._domain, *numbers, len(tried), len(tried - failed), len(tried - solved), len(covered))

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdict on each run: on the kept ones in the order of choice, then on the others in that of the input."""
        others = self._others
        stands_for = Counter[int]()
        nearest: dict[int, tuple[float, int]] = {}
        for place, stand_in in zip(others.tolist(), self._stand_ins, strict=False):
            stands_for[stand_in.number] += 1
            nearest[stand_in.number] = max(nearest.get(stand_in.number, (-1.0, 0)), (stand_in.similarity, place))
        for number, (place, adds) in enumerate(zip(self.kept_places, self._adds, strict=True), len(self._earlier_ids)):
            similarity, place_of_nearest = nearest.get(number, (None, None))
            other_id = None if place_of_nearest is None else self._id(place_of_nearest)
            where = self._candidates.files[place], self._candidates.lines[place]
            yield Verdict(self._id(place), self._domain, True, True, adds, stands_for[number], other_id, similarity, *where)
        kept_ids = [*self._earlier_ids, *map(self._id, self.kept_places)]
        stand_ins = iter(self._stand_ins)
        for place, eligible in zip(others.tolist(), self._candidates.eligible(others).tolist(), strict=True):
            nearest_kept = next(stand_ins, None)
            kept_id = kept_ids[nearest_kept.number] if nearest_kept else None
            similarity = nearest_kept.similarity if nearest_kept else None
            where = self._candidates.files[place], self._candidates.lines[place]
            yield Verdict(self._id(place), self._domain, eligible, False, None, None, kept_id, similarity, *where)

    def _found_stand_ins(self) -> Iterator[StandIn]:
        """Find the stand-in of each run that is not kept; find none if nothing is kept."""
        for first in range(0, len(self._others), _COMPARED):
            yield from self._coverage.stand_ins(self._candidates.vectors(self._others[first : first + _COMPARED]))

    def _id(self, place: int) -> str:
        return self._candidates.ids[place]


def choices(candidates: Candidates, best: float | int, rank: Rank, most_by_task: float = math.inf) -> Iterator[Choice]:
    """Choose from each domain, in the order in which domains first appear, a share of all runs, or a number of them."""
    domains = candidates.by_domain()
    sizes = [len(places) for places in domains.values()]
    most = round(best * len(candidates)) if isinstance(best, float) else best
    done = 0
    with progress("chosen from") as advance:
        for (domain, places), share in zip(domains.items(), apportioned(sizes, most), strict=True):
            yield Choice(candidates, domain, places, share, rank, most_by_task)
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


def compared(candidates: Candidates, share: float, labels: Mapping[str, bool]) -> str:
    """Return in words how good the traces of the highest scores are, and those of a set, of which each is a share of all."""
    domains = candidates.by_domain()
    places_by_rank: dict[Rank, list[int]] = {"score": [], "coverage": []}
    for (domain, places), most in zip(
        domains.items(), apportioned([len(each) for each in domains.values()], round(share * len(candidates))), strict=True
    ):
        places_by_rank["score"] += candidates.by_score(places)[:most].tolist()
        places_by_rank["coverage"] += Choice(candidates, domain, places, most, "coverage").kept_places
    words = []
    for rank, places_of_rank in places_by_rank.items():
        labelled = [labels[candidates.ids[place]] for place in places_of_rank if candidates.ids[place] in labels]
        good = [place for place in places_of_rank if labels.get(candidates.ids[place])]
        tasks = len(candidates.tasks(np.array(good, np.intp)))
        name = "by score" if rank == "score" else f"by `kp-scorer keep --best {share:.3%}`".replace(".000%", "%")
        words.append(f"{name} {sum(labelled)} of {len(labelled)} with a label are good, of {tasks} different tasks")
    return f"at {share:.3%} of the traces: {'; '.join(words)}".replace(".000%", "%")
