"""Counts the real traces that a gate accepts, over shuffled orders; ``tests.benchmarks.novelty`` explains the figures."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Final

import numpy as np
from kp_scorer.embedding.embedder import Vectors
from kp_scorer.scoring import Policy, novelty_of, score
from kp_scorer.settings.sections import NoveltySettings
from kp_scorer.trace import ReasoningTrace
from numpy.typing import NDArray

from tests.benchmarks.common import Row

_ACCEPTED: Final = 0.2

Floats = NDArray[np.float64]
Flags = NDArray[np.bool]
Places = NDArray[np.intp]
Ranked = tuple[Floats, Floats]
"""The novelty of each trace in an order, and the score by which the gate accepts it."""
Rank = Callable[[Places], Ranked]
"""A function that ranks the traces in an order, which is given as their places in the file."""


def is_repeat(tasks: Sequence[Hashable]) -> Flags:
    """Return for each trace but the first whether it repeats an earlier one."""
    firsts: dict[Hashable, int] = {}
    return np.array([firsts.setdefault(task, place) < place for place, task in enumerate(tasks)][1:])


def area(newer: Floats, older: Floats) -> float:
    """Return the share of pairs in which the first is higher, after rounding; a tie counts as half."""
    higher, lower = np.round(newer, 5)[:, None], np.round(older, 5)
    return float((higher > lower).mean() + (higher == lower).mean() / 2)


class Gate:
    """A gate that accepts the fifth of each domain with the highest scores."""

    def __init__(self, traces: Sequence[ReasoningTrace]) -> None:
        self._traces = traces
        least = NoveltySettings.succeeded_confidence
        self._is_success = np.array([each.metadata.success and each.outcome.confidence >= least for each in traces])
        self._tasks = _numbered([each.task.objective for each in traces])
        self._domains = _numbered([each.metadata.task_domain for each in traces])
        self._sources = _numbered([each.metadata.framework for each in traces])
        self._lengths = np.array([float(len(each.embedding_text)) for each in traces])

    def by_score(self, vectors: Vectors, against: str) -> Rank:
        """Return the ranking by score, with successes compared with all earlier traces or with those that ``succeeded``."""
        similarities = vectors @ vectors.T
        counts = self._is_success if against == "succeeded" else np.ones(len(vectors), np.bool)

        def rank(order: Places) -> Ranked:
            compared = np.tri(len(order), k=-1, dtype=np.bool) & (counts[order] | ~counts[order][:, None])
            largest = np.where(compared, similarities[np.ix_(order, order)], -np.inf).max(axis=1)
            novelty = [novelty_of(None if each == -np.inf else float(each)) for each in largest]
            scores = [score(self._traces[place], new, Policy()).score for place, new in zip(order, novelty, strict=True)]
            return np.array(novelty), np.array(scores)

        return rank

    def without_novelty(self) -> dict[str, Rank]:
        """Return rankings that know nothing of other traces' contents, by name."""

        def by_source(order: Places) -> Ranked:
            # This knows the tasks in advance, so that no rule by source alone does better.
            firsts = np.concatenate([[True], ~is_repeat(self._tasks[order].tolist())])
            return _shares(self._sources[order], firsts), _shares(self._sources[order], self._is_success[order])

        return {
            "position": lambda order: (values := -np.arange(float(len(order))), values),
            "length": lambda order: (self._lengths[order], self._lengths[order]),
            "success": lambda order: (values := self._is_success[order].astype(np.float64), values),
            "source": by_source,
        }

    def row(self, rank: Rank, orders: Sequence[Places]) -> Row:
        """Return the figures of a ranking, over all of these orders together."""
        chance = np.random.default_rng(0)
        parts, totals, areas = Counter[str](), Counter[str](), list[float]()
        for order in orders:
            novelty, scores = rank(order)
            repeats = is_repeat(self._tasks[order].tolist())
            areas.append(area(novelty[1:][~repeats], novelty[1:][repeats]))
            for name, is_so in self._judged(order, self._accepted(order, scores, chance)):
                parts[name] += is_so
                totals[name] += 1
        names = ("late", "at_once", "covered", "successes", "copies")
        shares: Row = {name: parts[name] / totals[name] for name in names}
        return {"by_objective": float(np.mean(areas)), "late_tasks": totals["late"] / len(orders), **shares}

    def _accepted(self, order: Places, scores: Floats, chance: np.random.Generator) -> Flags:
        accepted = np.zeros(len(order), np.bool)
        for domain in np.unique(self._domains):
            places = chance.permutation(np.flatnonzero(self._domains[order] == domain))
            highest = places[np.argsort(-scores[places], kind="stable")]
            accepted[highest[: round(_ACCEPTED * len(places))]] = True
        return accepted

    def _judged(self, order: Places, accepted: Flags) -> Iterator[tuple[str, bool]]:
        """Yield each property of the tasks and of the accepted traces, and whether it holds."""
        runs_of = defaultdict[int, list[tuple[bool, bool]]](list)
        for task, is_success, is_accepted in zip(self._tasks[order], self._is_success[order], accepted, strict=True):
            runs_of[task].append((bool(is_success), bool(is_accepted)))
        for runs in runs_of.values():
            if successes := [is_accepted for is_success, is_accepted in runs if is_success]:
                yield "at_once" if runs[0][0] else "late", successes[0]
                yield "covered", any(successes)
            for place, is_success in enumerate(is_success for is_success, is_accepted in runs if is_accepted):
                yield "successes", is_success
                yield "copies", place > 0


def _numbered(names: Sequence[object]) -> Places:
    """Return a number for each name, the same number for equal names."""
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names])


def _shares(groups: Places, flags: Flags) -> Floats:
    """Return for each trace the share of its group that has the flag."""
    shares: Floats = np.bincount(groups, flags) / np.maximum(np.bincount(groups), 1)
    return shares[groups]
