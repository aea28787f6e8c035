"""All figures of a report, from the decisions that it is about."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from types import MappingProxyType
from typing import Final, NamedTuple, get_args

import numpy as np

from kp_scorer.decision import Decision, Outcome
from kp_scorer.report.drift import DIMENSIONS

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)

THRESHOLDS: Final = tuple(number / 100 for number in range(101))
BINS: Final = 20  # How many bins a histogram has, all equally wide; an even threshold such as 0.75 lies between two of them.
NEAR: Final = 0.95  # The similarity to an earlier trace from which on a trace counts as a near duplicate.

_MOST_DOMAINS: Final = 7
_MOST_CALLS: Final = 8
_MOST_EXAMPLES: Final = 5
_MOST_STRETCHES: Final = 40
_FEWEST_IN_STRETCH: Final = 12
_MOST_POINTS: Final = 600


class Quartiles(NamedTuple):
    """The values below which a quarter, half and three quarters lie."""

    p25: float
    p50: float
    p75: float


class Distribution(NamedTuple):
    """How values are spread: their histogram and quartiles."""

    counts: tuple[int, ...]
    quartiles: Quartiles


class DomainSummary(NamedTuple):
    """The figures of a domain, or of several together, whose name is empty."""

    name: str
    smaller: int  # How many domains these are that are too small to be shown by themselves; 0 for one by itself, and for all.
    decisions: Sequence[Decision]
    outcomes: Mapping[Outcome, int]
    histograms: Mapping[Outcome, tuple[int, ...]]  # Of the scores with each outcome.
    scores: Distribution
    thresholds: Sequence[float]  # All that applied: domains have their own, submissions may ask for one, and settings change.
    accepted_at: tuple[int, ...]  # How many traces each of ``THRESHOLDS`` would accept.


class Stretch(NamedTuple):
    """Traces from one place in the order, from 1, to another, and the quartiles of their novelty."""

    first: int
    last: int
    quartiles: Quartiles


class Course(NamedTuple):
    """The novelty of traces in their order."""

    stretches: tuple[Stretch, ...]  # All traces, in stretches of equal length but for one trace.
    points: tuple[tuple[int, float], ...]  # Places, from 1, and novelties of evenly spaced traces; all, up to 600.


class Analysis(NamedTuple):
    """The figures of all decisions, altogether and by domain."""

    total: DomainSummary
    domains: Sequence[DomainSummary]
    dimensions: Mapping[str, Distribution]
    novelty: Course
    closest: tuple[list[Decision], list[Decision]]  # Those just accepted, and those that just missed it.
    examples: Mapping[Outcome, list[Decision]]  # By outcome, decisions evenly spaced between the highest score and the lowest.
    dead_letters: int
    labels: Mapping[str, bool]  # Whether traces are good, by the ids of those that are labelled.


def analyse(decisions: Sequence[Decision], dead_letters: int, labels: Mapping[str, bool] = MappingProxyType({})) -> Analysis:
    """Analyse decisions, at least one, in the order of their traces; there are so many dead letters."""
    return Analysis(
        total=_summary(decisions),
        domains=by_name(decisions, lambda decision: decision.domain),
        dimensions={name: _distribution([getattr(each.dimensions, name) for each in decisions]) for name in DIMENSIONS},
        novelty=novelty_course(decisions),
        closest=closest_calls(decisions),
        examples={outcome: _spaced(decisions, outcome) for outcome in OUTCOMES},
        dead_letters=dead_letters,
        labels=labels,
    )


def by_name(
    decisions: Sequence[Decision], name_of: Callable[[Decision], str], most: int = _MOST_DOMAINS
) -> list[DomainSummary]:
    """Summarise the decisions of each name, the largest first; from ``most`` on, the smaller ones together, as the last.

    Producers may invent any number of domains and agents.
    """
    groups: defaultdict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        groups[name_of(decision)].append(decision)
    ordered = sorted(groups, key=lambda name: (-len(groups[name]), name))
    # If a single domain is left over, its name is better than "1 other domain".
    named = ordered if len(ordered) <= most + 1 else ordered[:most]
    summaries = [_summary(groups[name], name) for name in named]
    if unnamed := set(ordered[len(named) :]):
        summaries.append(_summary([each for each in decisions if name_of(each) in unnamed], smaller=len(unnamed)))
    return summaries


def _summary(decisions: Sequence[Decision], name: str = "", smaller: int = 0) -> DomainSummary:
    by_outcome = {outcome: [each.score for each in decisions if each.outcome == outcome] for outcome in OUTCOMES}
    return DomainSummary(
        name=name,
        smaller=smaller,
        decisions=decisions,
        outcomes={outcome: len(of_outcome) for outcome, of_outcome in by_outcome.items()},
        histograms={outcome: histogram(of_outcome) for outcome, of_outcome in by_outcome.items()},
        scores=_distribution([decision.score for decision in decisions]),
        thresholds=sorted({decision.threshold for decision in decisions}),
        accepted_at=accepted_at([decision.score for decision in decisions if not decision.is_guarded]),
    )


def histogram(values: Sequence[float]) -> tuple[int, ...]:
    """How many values, 0..1, lie in each bin; a value between two bins is in the upper one, and 1 in the last."""
    counts, _ = np.histogram(values, bins=np.arange(BINS + 1) / BINS)
    return tuple(counts.tolist())


def _quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def _distribution(values: Sequence[float]) -> Distribution:
    return Distribution(histogram(values), _quartiles(values))


def accepted_at(scores: Sequence[float]) -> tuple[int, ...]:
    """How many of the scores each of ``THRESHOLDS`` accepts."""
    ordered = np.sort(scores)
    return tuple((ordered.size - np.searchsorted(ordered, THRESHOLDS, "left")).tolist())


def lowest_threshold(accepted: Sequence[int], most: float) -> float | None:
    """The lowest of ``THRESHOLDS`` that accepts at most so many; None if even 1 accepts more.

    ``accepted`` is what :func:`accepted_at` returns.
    """
    return next((threshold for threshold, count in zip(THRESHOLDS, accepted, strict=True) if count <= most), None)


def closest_calls(decisions: Sequence[Decision], most: int = _MOST_CALLS) -> tuple[list[Decision], list[Decision]]:
    """At most so many accepted ones, then others, with scores next to their thresholds, the closest first.

    What a guard rejected missed no threshold.
    """
    accepted = (decision for decision in decisions if decision.outcome == "accepted")
    missed = (decision for decision in decisions if decision.outcome != "accepted" and not decision.is_guarded)
    return nsmallest(most, accepted, key=gap), nsmallest(most, missed, key=gap)


def _spaced(decisions: Sequence[Decision], outcome: Outcome) -> list[Decision]:
    """Evenly spaced ones with this outcome, from the highest score to the lowest."""
    ordered = sorted((each for each in decisions if each.outcome == outcome), key=lambda decision: -decision.score)
    places = np.linspace(0, len(ordered) - 1, min(_MOST_EXAMPLES, len(ordered))).round().astype(int)
    return [ordered[place] for place in places]


def gap(decision: Decision) -> float:
    """How far a score is from its threshold."""
    return abs(decision.score - decision.threshold)


def is_near_duplicate(decision: Decision) -> bool:
    """Whether an earlier trace is at least as similar as ``NEAR``, or has the same content."""
    nearest, duplicated = decision.novelty.nearest, decision.novelty.duplicate_of
    return bool(duplicated or (nearest and nearest.similarity >= NEAR))


def novelty_course(decisions: Sequence[Decision]) -> Course:
    """The course of novelty through decisions in the order of their traces; empty if no trace was compared."""
    measured = [each.dimensions.novelty for each in decisions if each.novelty.source in ("embedding", "empty_cache")]
    if not measured:
        return Course((), ())
    parts = np.array_split(np.array(measured), min(_MOST_STRETCHES, max(1, len(measured) // _FEWEST_IN_STRETCH)))
    ends = np.cumsum([part.size for part in parts]).tolist()
    stretches = (Stretch(end - part.size + 1, end, _quartiles(part.tolist())) for part, end in zip(parts, ends, strict=True))
    step = -(-len(measured) // _MOST_POINTS)
    return Course(tuple(stretches), tuple(enumerate(measured, 1))[::step])
