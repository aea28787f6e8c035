"""How far the decisions of a week differ from those of the week before."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import product
from math import log
from typing import Final, NamedTuple, get_args

from kp_scorer.decision import Decision, Dimensions, Outcome

DIMENSIONS: Final = tuple(Dimensions.model_fields)
MUCH: Final = 0.25
"""The stability index above which a population counts as another one (Siddiqi, Credit Risk Scorecards, 2006)."""
FEWEST: Final = 300
"""The traces that each week needs: two weeks of as many, between which nothing changed, reach ``MUCH`` once in 40,000."""
_WEEK: Final = timedelta(days=7)
_TENTHS: Final = tuple(f"0.{tenth}" for tenth in range(10))

Bin = tuple[str, str]
"""What is compared, a dimension, ``score`` or ``outcome``, and its value: an outcome, or where a tenth of 0..1 begins."""
BINS: Final[Sequence[Bin]] = (*product((*DIMENSIONS, "score"), _TENTHS), *product(("outcome",), get_args(Outcome)))


class Drift(NamedTuple):
    """The newest seven days of some decisions against the seven days before; pairs have the earlier week first."""

    traces: tuple[int, int]
    accepted: tuple[int, int]
    indices: Mapping[str, float]
    """The stability index of each dimension, the score and the outcome; empty if a week has fewer than ``FEWEST`` traces."""


def bins_of(decision: Decision) -> Iterator[Bin]:
    """The bins that a decision counts in, one of each kind; a value between two is in the upper one, and 1 in the last."""
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
    """When a decision was made, by the worker's clock."""
    return datetime.fromisoformat(decision.decided_at)


def stability_index(earlier: Mapping[Bin, float], newest: Mapping[Bin, float], name: str) -> float:
    """The population stability index of what ``name`` names: the sum of (p - q) ln(p / q) over the shares p, q of its bins.

    Each bin that a week uses counts half a trace more in both, as an empty bin would make the index infinite (the estimator of
    Krichevsky and Trofimov). Bins that no week uses count nothing, however many traces a week has more than the other.
    ``alerts.yml`` has the same formula.
    """
    used = [each for each in BINS if each[0] == name and earlier.get(each, 0) + newest.get(each, 0) > 0]
    corrected = [[week.get(each, 0) + 0.5 for each in used] for week in (earlier, newest)]
    shares = [[count / sum(counts) for count in counts] for counts in corrected]
    return float(sum((p - q) * log(p / q) for q, p in zip(*shares, strict=True)))
