"""The scores of a domain, what became of them, and the thresholds that they met."""

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple, get_args

from kp_scorer.analysis.distribution import Quantiles, histogram, quantiles
from kp_scorer.analysis.domains import Domain
from kp_scorer.decision import Outcome

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)


class Scores(NamedTuple):
    """The scores of a domain."""

    outcomes: Mapping[Outcome, int]
    """How many traces had each outcome."""
    histograms: Mapping[Outcome, tuple[int, ...]]
    """The histogram of the scores with each outcome."""
    quantiles: Quantiles
    threshold: float
    """The threshold that most of them met."""
    other_thresholds: int
    """How many met another one: submissions may ask for one, and settings change."""


def scores_of(domain: Domain) -> Scores:
    """The scores of a domain that has decisions."""
    by_outcome = {
        outcome: [decision.score for decision in domain.decisions if decision.outcome == outcome] for outcome in OUTCOMES
    }
    thresholds = Counter(decision.threshold for decision in domain.decisions)
    ((threshold, met),) = thresholds.most_common(1)
    return Scores(
        outcomes={outcome: len(found) for outcome, found in by_outcome.items()},
        histograms={outcome: histogram(found) for outcome, found in by_outcome.items()},
        quantiles=quantiles([decision.score for decision in domain.decisions]),
        threshold=threshold,
        other_thresholds=len(domain.decisions) - met,
    )
