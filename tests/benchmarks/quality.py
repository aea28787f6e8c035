"""Tests whether the intervals of `kp-scorer quality` hold, in simulated samples whose true precision and recall are known.

Scores of good and of bad traces are spread differently, and overlap. Half-way, the share that is sampled changes, and with it,
in some cases, how many traces are good.

- ``labels``: how many labelled traces there are, on average.
- ``good``: the share of good traces; where it changes, before and after.
- ``shares``: how the sampled share after the change relates to that before.
- ``precision``, ``recall``: of the gate, the percentage of runs in which the interval of 95% holds the true value.
- ``precision_below``, ``recall_below``: the same of a lower threshold.
"""

from itertools import product
from statistics import NormalDist, fmean
from typing import Final

import numpy as np
from kp_scorer.report.intervals import Share
from kp_scorer.report.quality import Judged

from tests.benchmarks.common import Row, arguments, report

GATE: Final = 0.6
BELOW: Final = 0.5
LABELS: Final = (50, 200, 1_000, 5_000)
GOOD: Final = ((0.2, 0.2), (0.5, 0.5), (0.8, 0.8), (0.4, 0.6), (0.6, 0.8))
SHARES: Final = (1.0, 2.0, 5.0)
_BEFORE: Final = 0.01
_SCORES: Final = {True: NormalDist(0.6, 0.12), False: NormalDist(0.45, 0.12)}
"""Of good traces and of bad ones."""
_SEED: Final = 1


def main() -> None:
    options = arguments(__doc__, runs=2_000).parse_args()
    report("quality", (row_of(*case, options.runs) for case in product(LABELS, GOOD, SHARES)))


def row_of(labels: int, good: tuple[float, float], shares: float, runs: int) -> Row:
    """The figures of a case: so many labels, the share of good traces in each half, and how the sampled shares relate."""
    rng = np.random.default_rng(_SEED)
    samples = [draw(labels, good, shares, rng) for _ in range(runs)]
    row: Row = {"labels": labels, "shares": shares, "good": " to ".join(f"{share:g}" for share in dict.fromkeys(good))}
    for suffix, threshold in (("", GATE), ("_below", BELOW)):
        estimates = [sample.estimate(threshold) for sample in samples]
        precision, recall = truth(fmean(good), threshold)
        row[f"precision{suffix}"] = held([each.precision for each in estimates], precision)
        row[f"recall{suffix}"] = held([each.recall for each in estimates], recall)
    return row


def draw(labels: int, good: tuple[float, float], shares: float, rng: np.random.Generator) -> Judged:
    """A sample with its labels, from two halves of equally many traces."""
    probabilities, halves = (_BEFORE, _BEFORE * shares), []
    for good_share, probability in zip(good, probabilities, strict=True):
        count = max(1, rng.poisson(labels * probability / sum(probabilities)))
        is_good = rng.random(count) < good_share
        scores = rng.normal(np.where(is_good, _SCORES[True].mean, _SCORES[False].mean), _SCORES[True].stdev)
        halves.append((scores, scores >= GATE, is_good, np.full(count, probability)))
    return Judged(*map(np.concatenate, zip(*halves, strict=True)))


def truth(good: float, threshold: float) -> tuple[float, float]:
    """The precision and the recall of a threshold among all traces."""
    passing = {label: 1 - scores.cdf(threshold) for label, scores in _SCORES.items()}
    return good * passing[True] / (good * passing[True] + (1 - good) * passing[False]), passing[True]


def held(shares: list[Share | None], value: float) -> float:
    """In how many percent of the runs that have an interval it holds the value."""
    intervals = [share for share in shares if share]
    return round(100 * sum(share.low <= value <= share.high for share in intervals) / len(intervals), 1)


if __name__ == "__main__":
    main()
