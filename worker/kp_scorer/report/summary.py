"""Computes the figures of a report from its decisions."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import nsmallest
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from kp_scorer.decision import Decision, Outcome
from kp_scorer.report.drift import DIMENSIONS

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)

THRESHOLDS: Final = tuple(number / 100 for number in range(101))
BINS: Final = 20  # The bins of a histogram, all equally wide. A round threshold such as 0.75 lies between two of them.
NEAR: Final = 0.95  # From this similarity to an earlier trace on, a trace is a near duplicate.

_MOST_DOMAINS: Final = 7  # Producers may invent any number of domains and agents.
_MOST_CALLS: Final = 8
_MOST_EXAMPLES: Final = 5
_MOST_STRETCHES: Final = 40
_FEWEST_IN_STRETCH: Final = 12
_MOST_POINTS: Final = 600


class Quartiles(NamedTuple):
    """The values below which a quarter, a half and three quarters of all values lie."""

    p25: float
    p50: float
    p75: float


class Distribution(NamedTuple):
    """The histogram and the quartiles of some values."""

    counts: tuple[int, ...]
    quartiles: Quartiles


class DomainSummary(NamedTuple):
    """The figures of a domain, or of several together; then ``name`` is empty."""

    name: str
    smaller: int  # The number of small domains that this summary stands for; 0 if it stands for one domain, or for all.
    decisions: Sequence[Decision]
    outcomes: Mapping[Outcome, int]
    histograms: Mapping[Outcome, tuple[int, ...]]  # For each outcome, the histogram of its scores.
    scores: Distribution
    # All thresholds that applied, ascending; empty under a gate. There may be several, because settings change and submissions
    # may request their own.
    thresholds: Sequence[float]
    accepted_at: tuple[int, ...]  # The number of traces that each of ``THRESHOLDS`` would accept.


class Stretch(NamedTuple):
    """Consecutive traces: the places of the first and the last, counted from 1, and the quartiles of their novelty."""

    first: int
    last: int
    quartiles: Quartiles


class Course(NamedTuple):
    """The course of novelty through traces in their order."""

    stretches: tuple[Stretch, ...]  # All traces, in stretches whose lengths differ by at most one.
    points: tuple[tuple[int, float], ...]  # Places from 1 and novelties of at most 600 evenly spaced traces.


class Analysis(NamedTuple):
    """The figures of all decisions, together and by domain."""

    total: DomainSummary
    domains: Sequence[DomainSummary]
    dimensions: Mapping[str, Distribution]
    novelty: Course
    closest: tuple[list[Decision], list[Decision]]  # The decisions just accepted, and those just missed.
    examples: Mapping[Outcome, list[Decision]]  # Some of each outcome, evenly spaced from the highest score to the lowest.
    dead_letters: int
    labels: Mapping[str, bool] = MappingProxyType({})  # True for each labelled trace that is good, by id.
    tasks: Sequence[tuple[int, int, str]] = ()  # Each task's numbers of runs and successes, and the id of its first trace.
    objectives: Mapping[str, str] = MappingProxyType({})  # By trace id, for those whose content is available.
    points: Sequence[Mapping[str, Any]] = ()  # The traces on a map of kept and dropped ones, if there is one.


def analyse(decisions: Sequence[Decision], dead_letters: int) -> Analysis:
    """Compute the figures of at least one decision, given in the order of their traces."""
    return Analysis(
        total=_summary(decisions),
        domains=by_name(decisions, lambda decision: decision.domain),
        dimensions={name: _distribution([getattr(each.dimensions, name) for each in decisions]) for name in DIMENSIONS},
        novelty=novelty_course(decisions),
        closest=closest_calls(decisions),
        examples={outcome: _spaced(decisions, outcome) for outcome in OUTCOMES},
        dead_letters=dead_letters,
    )


def by_name(
    decisions: Sequence[Decision], name_of: Callable[[Decision], str], most: int = _MOST_DOMAINS
) -> list[DomainSummary]:
    """Summarise the decisions of each name, the most frequent first; beyond ``most`` names, the rest together as the last."""
    groups: defaultdict[str, list[Decision]] = defaultdict(list)
    for decision in decisions:
        groups[name_of(decision)].append(decision)
    ordered = sorted(groups, key=lambda name: (-len(groups[name]), name))
    # A single remaining name is better than "1 other domain".
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
        thresholds=sorted({decision.threshold for decision in decisions if not decision.gate}),
        accepted_at=accepted_at([decision.score for decision in decisions if not decision.is_guarded]),
    )


def histogram(values: Sequence[float]) -> tuple[int, ...]:
    """Return the number of values, 0..1, in each bin. A value on an edge is in the upper bin, and 1 in the last one."""
    counts, _ = np.histogram(values, bins=np.arange(BINS + 1) / BINS)
    return tuple(counts.tolist())


def _quartiles(values: Sequence[float]) -> Quartiles:
    return Quartiles(*np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def _distribution(values: Sequence[float]) -> Distribution:
    return Distribution(histogram(values), _quartiles(values))


def accepted_at(scores: Sequence[float]) -> tuple[int, ...]:
    """Return the number of scores that each of ``THRESHOLDS`` accepts."""
    ordered = np.sort(scores)
    return tuple((ordered.size - np.searchsorted(ordered, THRESHOLDS, "left")).tolist())


def lowest_threshold(accepted: Sequence[int], most: float) -> float | None:
    """Return the lowest threshold that accepts at most ``most`` traces, by :func:`accepted_at`; None if even 1 accepts more."""
    return next((threshold for threshold, count in zip(THRESHOLDS, accepted, strict=True) if count <= most), None)


def closest_calls(decisions: Sequence[Decision], most: int = _MOST_CALLS) -> tuple[list[Decision], list[Decision]]:
    """Return the accepted decisions and the others whose scores are nearest to their thresholds, the closest first.

    There are at most ``most`` of each. Traces that a guard rejects miss no threshold, so they do not count.
    """
    accepted = (decision for decision in decisions if decision.outcome == "accepted")
    missed = (decision for decision in decisions if decision.outcome != "accepted" and not decision.is_guarded)
    return nsmallest(most, accepted, key=gap), nsmallest(most, missed, key=gap)


def _spaced(decisions: Sequence[Decision], outcome: Outcome) -> list[Decision]:
    """Return evenly spaced decisions with this outcome, from the highest score to the lowest."""
    ordered = sorted((each for each in decisions if each.outcome == outcome), key=lambda decision: -decision.score)
    places = np.linspace(0, len(ordered) - 1, min(_MOST_EXAMPLES, len(ordered))).round().astype(int)
    return [ordered[place] for place in places]


def gap(decision: Decision) -> float:
    """Return the distance of a score from its threshold."""
    return abs(decision.score - decision.threshold)


def is_near_duplicate(decision: Decision) -> bool:
    """Return whether an earlier trace has the same content or a similarity of at least ``NEAR``."""
    nearest, duplicated = decision.novelty.nearest, decision.novelty.duplicate_of
    return bool(duplicated or (nearest and nearest.similarity >= NEAR))


def novelty_course(decisions: Sequence[Decision]) -> Course:
    """Return the course of novelty through decisions in the order of their traces; empty if none was compared."""
    measured = [each.dimensions.novelty for each in decisions if each.novelty.source in ("embedding", "empty_cache")]
    if not measured:
        return Course((), ())
    parts = np.array_split(np.array(measured), min(_MOST_STRETCHES, max(1, len(measured) // _FEWEST_IN_STRETCH)))
    ends = np.cumsum([part.size for part in parts]).tolist()
    stretches = (Stretch(end - part.size + 1, end, _quartiles(part.tolist())) for part, end in zip(parts, ends, strict=True))
    step = -(-len(measured) // _MOST_POINTS)
    return Course(tuple(stretches), tuple(enumerate(measured, 1))[::step])
