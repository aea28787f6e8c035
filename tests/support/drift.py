"""The drift between two weeks of decisions by its definition, with which the rules of Prometheus are compared."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import log
from typing import Final, NamedTuple

from kp_scorer.decision import Decision
from kp_scorer.process.metrics import BINS, Bin, bins_of

WEEK: Final = timedelta(days=7)
MUCH: Final = 0.25
"""Above this stability index two populations count as different (Siddiqi, Credit Risk Scorecards, 2006)."""
FEWEST: Final = 300
"""The traces that each week needs. Two weeks of as many without any change reach ``MUCH`` once in 40,000 comparisons."""


class Drift(NamedTuple):
    """A comparison of two weeks of decisions. In pairs, the earlier week is first."""

    traces: tuple[int, int]
    accepted: tuple[int, int]
    indices: Mapping[str, float]
    """The stability index of each dimension, the score and the outcome."""


def drift(decisions: Sequence[Decision], end: datetime) -> Drift:
    """Compare the decisions of the seven days up to ``end`` with those of the seven days before."""
    weeks: list[list[Decision]] = [[], []]
    for decision in decisions:
        weeks[time_of(decision) > end - WEEK].append(decision)
    earlier, newest = (Counter(each for decision in week for each in bins_of(decision)) for week in weeks)
    return Drift(
        traces=(len(weeks[0]), len(weeks[1])),
        accepted=(earlier["outcome", "accepted"], newest["outcome", "accepted"]),
        indices={name: stability_index(earlier, newest, name) for name in dict.fromkeys(name for name, _ in BINS)},
    )


def time_of(decision: Decision) -> datetime:
    return datetime.fromisoformat(decision.decided_at)


def stability_index(earlier: Mapping[Bin, float], newest: Mapping[Bin, float], name: str) -> float:
    """Return the population stability index of a dimension, the score or the outcome: Σ (p - q) ln(p / q).

    p and q are the shares of a bin in the two weeks. An empty bin would make the index infinite, so each bin that either week
    uses has half a trace more in both (the estimator of Krichevsky and Trofimov). Bins that no week uses do not count.
    """
    used = [each for each in BINS if each[0] == name and earlier.get(each, 0) + newest.get(each, 0) > 0]
    corrected = [[week.get(each, 0) + 0.5 for each in used] for week in (earlier, newest)]
    shares = [[count / sum(counts) for count in counts] for counts in corrected]
    return float(sum((p - q) * log(p / q) for q, p in zip(*shares, strict=True)))
