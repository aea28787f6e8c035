"""Shares with the intervals around them."""

import math
from typing import Any, Final, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]

Z: Final = 1.96  # 19 of 20 cases lie within so many standard deviations.


class Share(NamedTuple):
    """A share, 0..1, and the interval of 19 of 20 cases around it."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        """The interval in whole percents: "85-95%"."""
        return f"{100 * self.low:.0f}-{100 * self.high:.0f}%"


def counted_share(part: int, total: int) -> Share | None:
    """A share that was counted, with Wilson's interval; None of nothing."""
    if not total:
        return None
    share, extra = part / total, Z**2 / total
    middle, width = share + extra / 2, Z * math.sqrt(share * (1 - share) / total + extra / (4 * total))
    # Of none or of all, one end is the share itself, but for the last bits.
    return Share(
        share, min(max((middle - width) / (1 + extra), 0.0), share), max(min((middle + width) / (1 + extra), 1.0), share)
    )


def weighted_share(is_part: Booleans, probabilities: Floats) -> Share | None:
    """The share of a part in all traces, from those that were sampled by these probabilities; None if there are none.

    A ratio estimator, each trace weighing 1 / its probability. The interval is Wilson's where all are equal. Otherwise the
    distances of each probability's own interval add up by their squares (Zou, Huang and Zhang, 2009), with the variance that
    comes of not knowing how many traces each stands for. That counts where their shares differ by more than chance.
    """
    if not is_part.size:
        return None
    total = float((1 / probabilities).sum())
    share = float(is_part @ (1 / probabilities)) / total
    below = above = 0.0
    for probability in np.unique(probabilities):
        stratum = is_part[probabilities == probability]
        count, hits, weight = stratum.size, int(stratum.sum()), stratum.size / probability / total
        own = counted_share(hits, count)
        assert own, "a stratum has traces"
        smoothed = (hits + Z**2 / 2) / (count + Z**2)
        by_chance = (1 - weight) ** 2 * smoothed * (1 - smoothed) / count
        between = max((own.value - share) ** 2 - by_chance, 0.0) * (Z * weight) ** 2 / count
        below += (weight * (own.value - own.low)) ** 2 + between
        above += (weight * (own.high - own.value)) ** 2 + between
    return Share(share, max(share - math.sqrt(below), 0.0), min(share + math.sqrt(above), 1.0))
