"""Measures how far the decisions of a week differ from those of the week before."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import product
from math import log
from typing import Final, NamedTuple, get_args

from kp_scorer.decision import Decision, Dimensions, Outcome

DIMENSIONS: Final = tuple(Dimensions.model_fields)
MUCH: Final = 0.25  # Above this stability index two populations count as different (Siddiqi, Credit Risk Scorecards, 2006).
FEWEST: Final = 300
"""The number of traces that each week needs. Two weeks of this size reach ``MUCH`` by chance once in 40,000 comparisons."""
_WEEK: Final = timedelta(days=7)
_TENTHS: Final = tuple(f"0.{tenth}" for tenth in range(10))

Bin = tuple[str, str]
"""The name of a dimension, ``score`` or ``outcome``, and a range of its values: an outcome, or the start of a tenth of 0..1."""
BINS: Final[Sequence[Bin]] = (*product((*DIMENSIONS, "score"), _TENTHS), *product(("outcome",), get_args(Outcome)))


class Drift(NamedTuple):
    """A comparison of the newest seven days of decisions with the seven days before. In pairs, the earlier week is first."""

    traces: tuple[int, int]
    accepted: tuple[int, int]
    indices: Mapping[str, float]
    """The stability index of each dimension, the score and the outcome; empty if a week has fewer than ``FEWEST`` traces."""


def bins_of(decision: Decision) -> Iterator[Bin]:
    """Yield the bins of a decision, one for each name. A value on the edge of two is in the upper one, and 1 in the last."""
    for name in DIMENSIONS:
        yield name, _tenth(getattr(decision.dimensions, name))
    yield "score", _tenth(decision.score)
    yield "outcome", decision.outcome


def _tenth(value: float) -> str:
    return _TENTHS[min(int(value * 10), 9)]


def drift(decisions: Sequence[Decision], end: datetime) -> Drift:
    """Compare the decisions of the seven days up to ``end`` with those of the seven days before."""
    weeks: list[list[Decision]] = [[], []]
    for decision in decisions:
        age = end - time_of(decision)
        if age < 2 * _WEEK:
            weeks[age < _WEEK].append(decision)
    earlier, newest = (Counter(each for decision in week for each in bins_of(decision)) for week in weeks)
    names = dict.fromkeys(name for name, _ in BINS) if min(map(len, weeks)) >= FEWEST else ()
    return Drift(
        traces=(len(weeks[0]), len(weeks[1])),
        accepted=(earlier["outcome", "accepted"], newest["outcome", "accepted"]),
        indices={name: stability_index(earlier, newest, name) for name in names},
    )


def time_of(decision: Decision) -> datetime:
    """Return the time when a decision was made, by the clock of the worker."""
    return datetime.fromisoformat(decision.decided_at)


def stability_index(earlier: Mapping[Bin, float], newest: Mapping[Bin, float], name: str) -> float:
    """Return the population stability index of a dimension, the score or the outcome: Σ (p - q) ln(p / q).

    p and q are the shares of a bin in the two weeks. An empty bin would make the index infinite, so each bin that either week
    uses has half a trace more in both (the estimator of Krichevsky and Trofimov). Bins that no week uses do not count.
    ``alerts.yml`` has the same formula.
    """
    used = [each for each in BINS if each[0] == name and earlier.get(each, 0) + newest.get(each, 0) > 0]
    corrected = [[week.get(each, 0) + 0.5 for each in used] for week in (earlier, newest)]
    shares = [[count / sum(counts) for count in counts] for counts in corrected]
    return float(sum((p - q) * log(p / q) for q, p in zip(*shares, strict=True)))
