"""A threshold with intervals: what other samples would have led to, and what unseen traces are to be expected to do."""

import math
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.analysis.cuts import Floats
from kp_scorer.analysis.target import Target, Z
from kp_scorer.analysis.threshold import Integers, Sample, Tally, above, accepted_share, choose, precision, tally

_RESAMPLES: Final = 1_000
_COUNTED_AT_ONCE: Final = 1_000_000
"""How many figures of resamples are held at once."""
_PERCENTILES: Final = (2.5, 97.5)
_SEED: Final = 1


class Share(NamedTuple):
    """A share, 0..1, and within what it is to be expected in 19 of 20 cases."""

    value: float
    low: float
    high: float


class Suggestion(NamedTuple):
    """A threshold, and what it does to traces of the same kind."""

    threshold: float
    low: float
    """19 of 20 samples of as many traces lead to a threshold between this and ``high``."""
    high: float
    accepted: Share
    precision: Share | None
    """None where no accepted trace has a label."""


def suggest(sample: Sample, target: Target) -> Suggestion | None:
    """Suggest a threshold for a sample that has enough traces; None if there is none with the precision.

    The intervals come from choosing anew in 1,000 resamples. By as much as such a choice does something else to the sample than
    to its own resample, the suggestion does something else to unseen traces than to the sample. The same sample gives the same
    intervals.
    """
    counted = tally(sample, target)
    accepted = above(counted.traces)
    (index,), (reached,) = choose(accepted[np.newaxis], target)
    if not reached:
        return None
    chosen, shares, precisions = _resampled(counted, accepted, target)
    low, high = np.percentile(counted.thresholds[chosen], _PERCENTILES)
    return Suggestion(
        threshold=float(counted.thresholds[index]),
        low=float(low),
        high=float(high),
        accepted=_around(float(accepted_share(accepted)[index]), shares),
        precision=_precision(accepted[index], precisions),
    )


def counted_share(part: int, of: int) -> Share | None:
    """A share that was counted, with Wilson's interval; None of nothing."""
    if not of:
        return None
    share, extra = part / of, Z**2 / of
    middle, width = share + extra / 2, Z * math.sqrt(share * (1 - share) / of + extra / (4 * of))
    # Of none or of all, one end is the share itself, but for the last bits.
    return Share(
        share, min(max((middle - width) / (1 + extra), 0.0), share), max(min((middle + width) / (1 + extra), 1.0), share)
    )


def _resampled(counted: Tally, accepted: Integers, target: Target) -> tuple[Integers, Floats, Floats]:
    """Choose in resamples; return what was chosen, and what share and precision it has more in the sample than there."""
    flat = counted.traces.reshape(-1)
    filled = np.flatnonzero(flat)
    rng = np.random.default_rng(_SEED)
    at_once = max(1, _COUNTED_AT_ONCE // flat.size)
    found: list[tuple[Integers, Floats, Floats]] = []
    for begin in range(0, _RESAMPLES, at_once):
        drawn = np.zeros((min(at_once, _RESAMPLES - begin), flat.size), np.int64)
        drawn[:, filled] = rng.multinomial(flat.sum(), flat[filled] / flat.sum(), len(drawn))
        again = above(drawn.reshape(-1, *counted.traces.shape))
        index, _ = choose(again, target)
        each = np.arange(len(drawn))
        shares, precisions = (of(accepted)[index] - of(again)[each, index] for of in (accepted_share, precision))
        found.append((index, shares, precisions))
    chosen, all_shares, all_precisions = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return chosen, all_shares, all_precisions


def _around(value: float, off: Floats) -> Share:
    low, high = np.nanpercentile(off, _PERCENTILES)
    return Share(value, max(value + float(low), 0.0), min(value + float(high), 1.0))


def _precision(accepted: Integers, off: Floats) -> Share | None:
    bad, good, _ = map(int, accepted)
    counted = counted_share(good, good + bad)
    if counted is None:
        return None
    # Where all are good, so are those of every resample, which would make it certain.
    found = _around(counted.value, off)
    return Share(counted.value, min(found.low, counted.low), max(found.high, counted.high))
