"""Computes shares with their confidence intervals."""

import math
from typing import Any, Final, NamedTuple

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Booleans = np.ndarray[Any, np.dtype[np.bool_]]

Z: Final = 1.96  # The number of standard deviations around a mean within which 19 of 20 cases lie.


class Share(NamedTuple):
    """A share, 0..1, and an interval that contains the true share in 19 of 20 cases."""

    value: float
    low: float
    high: float

    @property
    def interval(self) -> str:
        """The interval in whole percents: "85-95%"."""
        return f"{100 * self.low:.0f}-{100 * self.high:.0f}%"


def counted_share(part: int, total: int) -> Share | None:
    """Return the share of a part in a total, with Wilson's interval; None for a total of 0."""
    if not total:
        return None
    share, extra = part / total, Z**2 / total
    middle, width = share + extra / 2, Z * math.sqrt(share * (1 - share) / total + extra / (4 * total))
    # For a share of 0 or 1, rounding could put one end of the interval beyond it.
    return Share(
        share, min(max((middle - width) / (1 + extra), 0.0), share), max(min((middle + width) / (1 + extra), 1.0), share)
    )


def weighted_share(is_part: Booleans, probabilities: Floats) -> Share | None:
    """Estimate the share of a part in all traces from traces that were sampled by these probabilities; None for no traces.

    This is a ratio estimator, in which a trace weighs 1 / its probability. If all probabilities are equal, the interval is
    Wilson's. Otherwise the traces of each probability are a stratum: the widths of the strata's own intervals add up by their
    squares (Zou, Huang and Zhang, 2009), together with the variance of the strata's sizes, which are estimates too. The latter
    counts as far as the shares of strata differ by more than chance.
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
