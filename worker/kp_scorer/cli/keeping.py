"""Chooses a set among candidates for ``kp-scorer keep --best``, domain by domain."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import Any, Final, Literal

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from kp_scorer.cli.candidates import Candidates
from kp_scorer.cli.display import cell, console, progress
from kp_scorer.cli.output import note_count, note_ids, print_note
from kp_scorer.coverage import BATCH, NOTHING, Coverage, StandIn, apportioned

_NEAR_COPY: Final = 0.7  # From this similarity by words on, people take two runs for the same task, done in the same way.
# The runs that are compared with all kept ones at once: with 10,000 of these, their similarities take 20 MB.
_COMPARED: Final = 512
_MOST_ROWS: Final = 50

Rank = Literal["coverage", "score"]


class Choice:
    """The runs of one domain that are kept, and for each other run the kept one that stands for it.

    If runs were kept before, a run is kept only if it adds more than a near copy of these would.
    """

    def __init__(
        self, candidates: Candidates, domain: str, places: Sequence[int], most: int, rank: Rank, most_by_task: float = math.inf
    ) -> None:
        """Choose up to ``most`` of the runs at these places: in their order, batch by batch, or those of the highest scores."""
        self._candidates, self.domain, self._places, self._runs = candidates, domain, places, candidates.runs
        self._earlier_ids, earlier = candidates.earlier(domain)
        self._coverage = Coverage(earlier)
        self._eligible = [place for place in places if self._runs[place].eligible]
        self.had_room = 0 < len(self._eligible) <= most  # True if there was room for every run that may be kept.
        # The amount that each kept run adds, by its place, in the order of choice; None for a run that is kept for its score.
        if rank == "score":
            self._adds: dict[int, float | None] = dict.fromkeys(islice(self._highest(most_by_task), most))
            self._coverage.keep(candidates.vectors(self.kept_places))
        else:
            self._adds = dict(self._covering(most, 1 - _NEAR_COPY if len(earlier) else NOTHING, most_by_task))
        # The stand-in of each run that is not kept; empty if no run is kept.
        self._stand_ins = dict[int, StandIn]()
        others = [place for place in places if place not in self._adds]
        for first in range(0, len(others), _COMPARED):
            compared = others[first : first + _COMPARED]
            self._stand_ins |= zip(compared, self._coverage.stand_ins(candidates.vectors(compared)), strict=False)

    @property
    def kept_places(self) -> list[int]:
        """The places of the kept runs, in the order in which they were chosen."""
        return list(self._adds)

    def _highest(self, most_by_task: float) -> Iterator[int]:
        by_task = Counter[int]()
        for place in self._candidates.by_score(self._eligible):
            by_task[self._runs[place].task] += 1
            if by_task[self._runs[place].task] <= most_by_task:
                yield place

    def _covering(self, most: int, least: float, most_by_task: float) -> Iterator[tuple[int, float]]:
        chosen_number = 0
        for first in range(0, len(self._places), BATCH):
            batch = self._places[first : first + BATCH]
            left = round(most * (first + len(batch)) / len(self._places)) - chosen_number
            runs, vectors = [self._runs[place] for place in batch], self._candidates.vectors(batch)
            eligible, tasks = [run.eligible for run in runs], [run.task for run in runs]
            for chosen in self._coverage.choose(vectors, eligible, left, least, tasks, most_by_task):
                chosen_number += 1
                yield batch[chosen.place], chosen.adds

    def summary(self) -> dict[str, int | str]:
        """Return the numbers of the domain's runs and tasks, by what becomes of them, for a row of a table.

        ``always`` counts the tasks whose runs are all eligible, so that there is little to learn; ``never`` counts those that
        have no eligible run.
        """
        runs = [self._runs[place] for place in self._places]
        near = [place for place, stand_in in self._stand_ins.items() if stand_in.similarity >= _NEAR_COPY]
        near_copies = sum(self._runs[place].eligible for place in near)
        numbers = {"runs": len(runs), "eligible": len(self._eligible), "kept": len(self._adds), "near copies": near_copies}
        tried, covered = {run.task for run in runs}, {self._runs[place].task for place in self._adds}
        solved, failed = ({run.task for run in runs if run.eligible is eligible} for eligible in (True, False))
        tasks = {"tasks": len(tried), "always": len(tried - failed), "never": len(tried - solved), "covered": len(covered)}
        # Leave these numbers out for decisions from Redis, which have no tasks.
        return {"domain": self.domain, **numbers, **(tasks if any(tried) else dict.fromkeys(tasks, ""))}

    def verdicts(self) -> Iterator[dict[str, Any]]:
        """Yield a row about each run: the kept ones in the order of choice, then the others in that of the input.

        For a kept run, ``adds`` is the coverage that it adds, ``stands_for`` the number of runs that it stands for, and
        ``nearest`` the nearest of these. For another run, ``nearest`` is the kept run that stands for it.
        """
        like: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, stand_in in self._stand_ins.items():
            like[stand_in.number].append((stand_in.similarity, place))
        for number, (place, adds) in enumerate(self._adds.items(), len(self._earlier_ids)):
            similarity, nearest_place = max(like[number], default=(None, None))
            nearest_id = None if nearest_place is None else self._runs[nearest_place].trace_id
            yield self._verdict(place, adds, len(like[number]), nearest_id, similarity)
        kept_ids = [*self._earlier_ids, *(self._runs[place].trace_id for place in self._adds)]
        for place in self._places:
            if place not in self._adds:
                nearest = self._stand_ins.get(place)
                kept_id, similarity = (kept_ids[nearest.number], nearest.similarity) if nearest else (None, None)
                yield self._verdict(place, None, None, kept_id, similarity)

    def _verdict(
        self, place: int, adds: float | None, stands_for: int | None, nearest: str | None, similarity: float | None
    ) -> dict[str, Any]:
        run = self._runs[place]
        return {
            "trace_id": run.trace_id,
            "domain": run.domain,
            "eligible": run.eligible,
            "kept": place in self._adds,
            "adds": None if adds is None else round(adds, 4),
            "stands_for": stands_for,
            "nearest": nearest,
            "similarity": None if similarity is None else round(similarity, 4),
            "file": run.file,
            "line": run.line,
        }


def choices(candidates: Candidates, best: float | int, rank: Rank, most_by_task: float = math.inf) -> Iterator[Choice]:
    """Yield the choice from each domain, in the order in which domains first appear.

    Together the choices keep up to a share (``best`` is a float) or a number of all runs.
    """
    done = 0
    with progress("chosen from") as advance:
        for domain, places, most in _shares(candidates, best):
            yield Choice(candidates, domain, places, most, rank, most_by_task)
            done += len(places)
            advance(done, len(candidates.runs))


def _shares(candidates: Candidates, best: float | int) -> Iterator[tuple[str, list[int], int]]:
    """Yield each domain with the places of its runs, and how many of them a choice may keep."""
    domains = defaultdict[str, list[int]](list)
    for place, run in enumerate(candidates.runs):
        domains[run.domain].append(place)
    most = round(best * len(candidates.runs)) if isinstance(best, float) else best
    shares = apportioned([len(places) for places in domains.values()], most)
    yield from zip(domains, domains.values(), shares, strict=True)


def print_summary(chosen: Sequence[Choice], kept_number: int, candidates: Candidates) -> None:
    """Print the choice to stderr: a table of the domains, or of those with the most runs if there are many, and notes."""
    summaries = [choice.summary() for choice in chosen]
    columns = (Column(each, justify="left" if each == "domain" else "right") for summary in summaries[:1] for each in summary)
    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    many = len(summaries) > _MOST_ROWS
    for summary in nlargest(_MOST_ROWS, summaries, key=itemgetter("runs")) if many else summaries:
        table.add_row(*(cell(str(value)) for value in summary.values()))
    console().print(table)
    if many:
        print_note(f"and {len(summaries) - _MOST_ROWS} smaller domains")
    print_note(f"kept {kept_number} of {len(candidates.runs)} traces")
    note_count(candidates.repeated, "have the id of an earlier trace, and are left out")
    roomy = [choice.domain for choice in chosen if choice.had_room]
    note_ids(roomy, "of the domains had room for every success, so nothing was chosen there, and only copies are left out")


def compared(candidates: Candidates, share: float, labels: Mapping[str, bool]) -> str:
    """Return a sentence that compares the best traces by score with a set of the same share of all traces, by their labels."""
    places_by_rank: dict[Rank, list[int]] = {"score": [], "coverage": []}
    for domain, places, most in _shares(candidates, share):
        places_by_rank["score"] += candidates.by_score(places)[:most]
        places_by_rank["coverage"] += Choice(candidates, domain, places, most, "coverage").kept_places
    words = []
    for rank, places in places_by_rank.items():
        runs = [candidates.runs[place] for place in places]
        labelled = sum(run.trace_id in labels for run in runs)
        good = [run for run in runs if labels.get(run.trace_id)]
        name = "by score" if rank == "score" else f"by `kp-scorer keep --best {share:.3%}`".replace(".000%", "%")
        tasks = len({run.task for run in good})
        words.append(f"{name} {len(good)} of {labelled} with a label are good, of {tasks} different tasks")
    return f"at {share:.3%} of the traces: {'; '.join(words)}".replace(".000%", "%")
