"""Whether the intervals of `kp-scorer quality` hold, in simulated samples whose true precision and recall are known.

Scores of good and of bad traces are spread differently, and overlap. Half-way, the share that is sampled changes, and with it,
in some cases, how many traces are good.

- ``labels``: how many labelled traces there are, on average.
- ``good``: the share of good traces; where it changes, before and after.
- ``shares``: how the sampled share after the change relates to that before.
- ``precision``, ``recall``: of the gate, the percentage of runs in which the interval of 95% holds the true value.
- ``precision_below``, ``recall_below``: the same of a lower threshold.
"""

import math
from itertools import product
from typing import Final, NamedTuple

import numpy as np
from kp_scorer.analysis.calibration import Share
from kp_scorer.analysis.quality import Judged

from tests.benchmarks.common import Row, arguments, report

GATE: Final = 0.6
BELOW: Final = 0.5
LABELS: Final = (50, 200, 1_000, 5_000)
GOOD: Final = ((0.2, 0.2), (0.5, 0.5), (0.8, 0.8), (0.4, 0.6), (0.6, 0.8))
SHARES: Final = (1.0, 2.0, 5.0)
_BEFORE: Final = 0.01
_MEANS: Final = {True: 0.6, False: 0.45}
_SPREAD: Final = 0.12
_SEED: Final = 1


class Case(NamedTuple):
    """What is simulated: so many labels, the share of good traces in each half, and how the sampled shares relate."""

    labels: int
    good: tuple[float, float]
    shares: float

    def probabilities(self) -> tuple[float, float]:
        return _BEFORE, _BEFORE * self.shares


def main() -> None:
    options = arguments(__doc__, runs=2_000).parse_args()
    report("quality", (row_of(Case(*each), options.runs) for each in product(LABELS, GOOD, SHARES)))


def row_of(case: Case, runs: int) -> Row:
    rng = np.random.default_rng(_SEED)
    samples = [draw(case, rng) for _ in range(runs)]
    row: Row = {"labels": case.labels, "shares": case.shares}
    row["good"] = " to ".join(f"{share:g}" for share in dict.fromkeys(case.good))
    for suffix, threshold in (("", GATE), ("_below", BELOW)):
        estimates = [sample.estimate(threshold) for sample in samples]
        precision, recall = truth(case, threshold)
        row[f"precision{suffix}"] = held([each.precision for each in estimates], precision)
        row[f"recall{suffix}"] = held([each.recall for each in estimates], recall)
    return row


def draw(case: Case, rng: np.random.Generator) -> Judged:
    """A sample with its labels, from two halves of equally many traces."""
    halves = []
    for good_share, probability in zip(case.good, case.probabilities(), strict=True):
        count = max(1, rng.poisson(case.labels * probability / sum(case.probabilities())))
        good = rng.random(count) < good_share
        scores = rng.normal(np.where(good, _MEANS[True], _MEANS[False]), _SPREAD)
        halves.append((scores, scores >= GATE, good, np.full(count, probability)))
    return Judged(*map(np.concatenate, zip(*halves, strict=True)))


def truth(case: Case, threshold: float) -> tuple[float, float]:
    """The precision and the recall of a threshold among all traces."""
    passing = {label: 0.5 * math.erfc((threshold - mean) / _SPREAD / math.sqrt(2)) for label, mean in _MEANS.items()}
    good = sum(case.good) / 2
    return good * passing[True] / (good * passing[True] + (1 - good) * passing[False]), passing[True]


def held(shares: list[Share | None], value: float) -> float:
    """In how many percent of the runs that have an interval it holds the value."""
    intervals = [share for share in shares if share]
    return round(100 * sum(share.low <= value <= share.high for share in intervals) / len(intervals), 1)


if __name__ == "__main__":
    main()
