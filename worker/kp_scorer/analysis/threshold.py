"""The threshold that a target asks for, in one sample of scores or in many at once."""

from typing import Any, Final, NamedTuple

import numpy as np

from kp_scorer.analysis.cuts import Floats, cut_of, cuts
from kp_scorer.analysis.target import Target

Integers = np.ndarray[Any, np.dtype[np.integer]]

BAD: Final = 0
GOOD: Final = 1
UNLABELLED: Final = 2
"""What is known of a trace, beside its score."""

_LABELS: Final = 3
_ROUNDING: Final = 1e-12


class Sample(NamedTuple):
    """Scores, and whether their traces were good."""

    scores: Floats
    """0..1, of shape (traces,)."""
    labels: Integers
    """``GOOD``, ``BAD`` or ``UNLABELLED``, of shape (traces,)."""

    def part(self, chosen: Any) -> "Sample":
        """The traces at these positions, or where this is true."""
        return Sample(self.scores[chosen], self.labels[chosen])

    @property
    def labelled(self) -> "Sample":
        """The traces that have a label."""
        return self.part(self.labels != UNLABELLED)


class Tally(NamedTuple):
    """The thresholds that may be chosen, and the traces between each and the next."""

    thresholds: Floats
    """Ascending from 0, of shape (cuts,)."""
    traces: Integers
    """How many, by label, of shape (cuts, 3)."""


def tally(sample: Sample, target: Target) -> Tally:
    """Count a sample's traces between thresholds that tell apart those that the target is about; there are some."""
    thresholds = cuts((sample if target.of == "accept" else sample.labelled).scores)
    places = cut_of(sample.scores, thresholds) * _LABELS + sample.labels
    return Tally(thresholds, np.bincount(places, minlength=thresholds.size * _LABELS).reshape(-1, _LABELS))


def above(traces: Integers) -> Integers:
    """How many traces each threshold accepts; as ``Tally.traces``, with any axes before."""
    return np.flip(np.cumsum(np.flip(traces, -2), -2), -2)


def accepted_share(accepted: Integers) -> Floats:
    """The share of traces that each threshold accepts, of shape (…, cuts), from what :func:`above` returns."""
    count = accepted.sum(-1)
    return np.asarray(count / count[..., :1])


def precision(accepted: Integers) -> Floats:
    """The share of good ones among the accepted with labels, NaN if there are none; as :func:`accepted_share`."""
    known = accepted[..., GOOD] + accepted[..., BAD]
    share: Floats = np.divide(accepted[..., GOOD], known, out=np.full(known.shape, np.nan), where=known > 0)
    return share


def choose(accepted: Integers, target: Target) -> tuple[Integers, "np.ndarray[Any, np.dtype[np.bool_]]"]:
    """Choose a threshold for each of several samples.

    For a share of accepted traces it is the one that comes nearest to it, of two the higher. For a precision it is the lowest
    that has it, of those that accept ``target.least_accepted`` traces with labels; where none does, the one with the highest.

    Args:
        accepted: what :func:`above` returns, of shape (samples, cuts, 3).
        target: what to reach.

    Returns:
        The positions of the thresholds, and whether they reach a precision, both of shape (samples,).
    """
    if target.of == "accept":
        counts = accepted.sum(-1)
        off = np.abs(counts / counts[:, :1] - target.share)
        nearest = off <= off.min(-1, keepdims=True) + _ROUNDING
        return _middle(counts, _last(nearest)), np.ones(len(counts), bool)
    counts = accepted[..., GOOD] + accepted[..., BAD]
    found = np.where(counts >= target.least_accepted, precision(accepted), -1.0)
    reached = found >= target.share - _ROUNDING
    any_has = np.asarray(reached.any(-1))
    return _middle(counts, np.where(any_has, reached.argmax(-1), found.argmax(-1))), any_has


def threshold_for(sample: Sample, target: Target) -> float | None:
    """The threshold that :func:`choose` takes for a sample; None if there is none with the precision."""
    if not (sample if target.of == "accept" else sample.labelled).scores.size:
        return None
    counted = tally(sample, target)
    (index,), (reached,) = choose(above(counted.traces)[np.newaxis], target)
    return float(counted.thresholds[index]) if reached else None


def _last(found: "np.ndarray[Any, np.dtype[np.bool_]]") -> Integers:
    return np.asarray(found.shape[-1] - 1 - np.flip(found, -1).argmax(-1))


def _middle(counts: Integers, index: Integers) -> Integers:
    """Of the thresholds that accept as many as the one at ``index``, as a resample has nothing between them, the middle one."""
    same = counts == np.take_along_axis(counts, index[:, np.newaxis], -1)
    return np.asarray((same.argmax(-1) + _last(same)) // 2)
