"""Suggests a threshold for the scores of one sample of traces, with intervals."""

import math
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from kp_scorer.report.intervals import Floats, Share, Z, counted_share

Integers = np.ndarray[Any, np.dtype[np.integer]]

# Labels of traces, which are also the columns of tallies.
BAD: Final = 0
GOOD: Final = 1
UNLABELLED: Final = 2
_LABELS: Final = 3

_WIDEST: Final = 0.1  # A share whose interval is wider than this on either side is useless.
_WIDEST_PRECISION: Final = 0.15  # The same limit for a precision, which only the accepted traces give.
_FEWEST: Final = 10  # With fewer traces on one side of a threshold, its place is a guess.
_FEWEST_ACCEPTED: Final = 20
STEPS: Final = 10_000
# The number of steps in a thousandth. Thresholds are rounded to three decimals where possible.
_COARSE: Final = 10
SAME: Final = 1e-9  # Scores that differ by less are equal: their parts were only summed in another order.
_ROUNDING: Final = 1e-12
_RESAMPLE_SEED: Final = 1
_RESAMPLES: Final = 1_000
_PERCENTILES: Final = (2.5, 97.5)


class Target(NamedTuple):
    """A share to reach, between 0 and 1, either of all traces or of the accepted ones."""

    of: Literal["accept", "precision"]
    """``accept``: the share of traces that are accepted. ``precision``: the share of accepted traces that are good."""
    share: float

    @property
    def percents(self) -> str:
        """The share in percents, as people write it."""
        return f"{100 * self.share:.6g}%"

    def traces_for(self, either_way: float) -> int:
        """Return the sample size at which 19 of 20 samples come within ``either_way`` of the share."""
        return math.ceil(self.share * (1 - self.share) * (Z / either_way) ** 2)

    @property
    def least_traces(self) -> int:
        """The fewest traces that allow a suggestion. For a precision, only traces with labels count."""
        return max(self.traces_for(_WIDEST), math.ceil(_FEWEST / min(self.share, 1 - self.share) - SAME))

    @property
    def least_accepted(self) -> int:
        """The fewest accepted traces with labels that give a precision."""
        return max(self.traces_for(_WIDEST_PRECISION), _FEWEST_ACCEPTED)


class Sample(NamedTuple):
    """The distinct pairs of score and label of some traces, and the number of traces with each pair; all of shape (values,)."""

    scores: Floats  # 0..1, or -inf for traces that a guard rejects.
    labels: Integers
    counts: Integers

    @property
    def traces(self) -> int:
        """The number of traces."""
        return int(self.counts.sum())

    @property
    def labelled(self) -> int:
        """The number of traces with a label."""
        return int(self.counts[self.labels != UNLABELLED].sum())

    def is_too_small(self, target: Target) -> bool:
        """Return whether these are too few traces for a suggestion."""
        return (self.traces if target.of == "accept" else self.labelled) < target.least_traces


class Suggestion(NamedTuple):
    """A threshold, and its expected effect on other traces of the same kind."""

    threshold: float
    low: float  # 19 of 20 samples of the same size lead to a threshold between this and ``high``.
    high: float
    accepted: Share
    precision: Share | None  # None where no accepted trace has a label.


def suggest(sample: Sample, target: Target) -> Suggestion | None:
    """Suggest a threshold for a sample with enough traces; return None if no threshold reaches the target.

    The intervals come from 1,000 resamples, in each of which a threshold is chosen anew. Its shares in the resample differ from
    those in the sample as the shares of the suggestion in the sample differ from those in unseen traces. The random numbers
    have a fixed seed, so the same sample gets the same intervals.
    """
    thresholds, traces = _tally(sample, target)
    accepted = _above(traces)
    index, is_reached = _choose(accepted, target)
    if not is_reached:
        return None
    chosen, shares, precisions = _resampled(traces, accepted, target)
    low, high = np.percentile(thresholds[chosen], _PERCENTILES)
    bad, good, _ = map(int, accepted[index])
    by_count = counted_share(good, good + bad)
    if by_count:
        # If all accepted traces are good, they are good in every resample too, so the precision would seem certain.
        resampled = _around(by_count.value, precisions)
        by_count = Share(by_count.value, min(resampled.low, by_count.low), max(resampled.high, by_count.high))
    share = _around(float(_accepted_share(accepted)[index]), shares)
    return Suggestion(float(thresholds[index]), float(low), float(high), share, by_count)


def _around(value: float, off: Floats) -> Share:
    low, high = np.nanpercentile(off, _PERCENTILES)
    return Share(value, max(value + float(low), 0.0), min(value + float(high), 1.0))


def _resampled(traces: Integers, accepted: Integers, target: Target) -> tuple[Integers, Floats, Floats]:
    """Choose a threshold in each resample; return its place, and the excess of its share and precision in the sample.

    The excess is over the figure in the resample. All three arrays are of shape (resamples,).
    """
    flat, rng = traces.reshape(-1), np.random.default_rng(_RESAMPLE_SEED)
    filled = np.flatnonzero(flat)
    drawn, total = np.zeros_like(flat), flat.sum()
    share, precision = _accepted_share(accepted), _precision(accepted)
    rounds = []
    for _ in range(_RESAMPLES):
        drawn[filled] = rng.multinomial(total, flat[filled] / total)
        resampled = _above(drawn.reshape(traces.shape))
        index, _ = _choose(resampled, target)
        more_share = share[index] - _accepted_share(resampled)[index]
        rounds.append((index, more_share, precision[index] - _precision(resampled)[index]))
    chosen, shares, precisions = map(np.array, zip(*rounds, strict=True))
    return chosen, shares, precisions


def cuts(scores: Floats) -> Floats:
    """Return the thresholds that separate scores (0..1), ascending from 0, of shape (cuts,).

    Each accepts fewer scores than the one before, and at least the highest score. Between two scores more than one step apart
    there is exactly one threshold, in the middle: another engine changes the last bits of a score, and not its side. Scores
    with no step between them are always accepted together.
    """
    ordered, grid = np.sort(scores), np.arange(STEPS + 1) / STEPS
    rejected = np.searchsorted(ordered, grid - SAME)
    hits_none = rejected == np.searchsorted(ordered, grid + SAME)
    steps = np.flatnonzero(hits_none & (rejected > 0) & (rejected < len(scores)))
    _, first, count = np.unique(rejected[steps], return_index=True, return_counts=True)
    low, high = steps[first], steps[first + count - 1]
    middle = (low + high) // 2
    coarse = (middle + _COARSE // 2) // _COARSE * _COARSE
    return np.concatenate([[0.0], np.where((low <= coarse) & (coarse <= high), coarse, middle) / STEPS])


def _tally(sample: Sample, target: Target) -> tuple[Floats, Integers]:
    """Count traces between the thresholds that separate them. There must be traces that the target concerns.

    Returns:
        The thresholds, ascending, of shape (cuts,): -inf, which is never chosen, then from 0; and the number of traces from
        each to the next, by label, of shape (cuts, 3).
    """
    scores = sample.scores if target.of == "accept" else sample.scores[sample.labels != UNLABELLED]
    thresholds = np.concatenate([[-np.inf], cuts(scores[scores >= 0])])
    places = (np.searchsorted(thresholds, sample.scores, "right") - 1) * _LABELS + sample.labels
    traces = np.bincount(places, sample.counts, minlength=thresholds.size * _LABELS)
    return thresholds, traces.astype(np.int64).reshape(-1, _LABELS)


def _above(traces: Integers) -> Integers:
    """Return how many traces each threshold accepts, given how many lie from each to the next; both of shape (cuts, 3)."""
    return np.cumsum(traces[::-1], 0)[::-1]


def _accepted_share(accepted: Integers) -> Floats:
    """Return the share of traces that each threshold accepts, of shape (cuts,)."""
    count = accepted.sum(-1)
    return np.asarray(count / count[0])


def _precision(accepted: Integers) -> Floats:
    """Return the share of good traces among the accepted ones with labels, NaN if there are none, of shape (cuts,)."""
    labelled = accepted[:, GOOD] + accepted[:, BAD]
    share: Floats = np.divide(accepted[:, GOOD], labelled, out=np.full(labelled.shape, np.nan), where=labelled > 0)
    return share


def _choose(accepted: Integers, target: Target) -> tuple[int, bool]:
    """Choose one of several thresholds by the numbers of traces that they accept, of shape (cuts, 3).

    For a share of accepted traces, it is the nearest, and of two equally near ones the higher. For a precision, it is the
    lowest that reaches it and accepts ``target.least_accepted`` traces with labels; or else the one of the highest precision.

    Returns:
        The position of the threshold, which is never the first, and whether it reaches the target.
    """
    shares, precisions = _accepted_share(accepted)[1:], _precision(accepted)[1:]
    accepted = accepted[1:]
    if target.of == "accept":
        counts, is_reached = accepted.sum(-1), bool(shares[0] >= target.share)
        off = np.abs(shares - target.share)
        index = np.flatnonzero(off <= off.min() + _ROUNDING)[-1]
    else:
        counts = accepted[:, GOOD] + accepted[:, BAD]
        precisions = np.where(counts >= target.least_accepted, precisions, -1.0)
        reaching = precisions >= target.share - _ROUNDING
        is_reached = bool(reaching.any())
        index = (reaching if is_reached else precisions).argmax()
    # In a resample, several thresholds may accept the same traces: take the middle one.
    same = np.flatnonzero(counts == counts[index])
    return int(same[0] + same[-1]) // 2 + 1, is_reached


def nearest_shares(sample: Sample, target: Target) -> tuple[float, float]:
    """Return the shares below and above that of the target that thresholds accept."""
    shares = _accepted_share(_above(_tally(sample, target)[1]))[1:]
    return float(shares[shares < target.share].max(initial=0.0)), float(shares[shares > target.share].min())
