"""Where a threshold can lie: between two scores, at a number of four decimals or fewer."""

from typing import Any, Final

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

_STEPS: Final = 10_000
_COARSE: Final = 10
"""So many steps are one of three decimals."""
_SAME: Final = 1e-9
"""Scores that differ by less are one score, summed up in another order."""


def cuts(scores: Floats) -> Floats:
    """The thresholds that tell scores (0..1, at least one) apart, ascending, of shape (cuts,).

    Each accepts fewer than the one before, and the highest score at least; the first is 0. Between two scores that are further
    apart than one step there is exactly one, in the middle, where what another engine computes is on the same side. Scores with
    no step between them are always accepted together.
    """
    ordered, grid = np.sort(scores), np.arange(_STEPS + 1) / _STEPS
    rejected = np.searchsorted(ordered, grid - _SAME)
    hits_none = rejected == np.searchsorted(ordered, grid + _SAME)
    steps = np.flatnonzero(hits_none & (rejected > 0) & (rejected < len(scores)))
    _, first, count = np.unique(rejected[steps], return_index=True, return_counts=True)
    low, high = steps[first], steps[first + count - 1]
    middle = (low + high) // 2
    coarse = (middle + _COARSE // 2) // _COARSE * _COARSE
    return np.concatenate([[0.0], np.where((low <= coarse) & (coarse <= high), coarse, middle) / _STEPS])


def cut_of(scores: Floats, thresholds: Floats) -> "np.ndarray[Any, np.dtype[np.intp]]":
    """Which is the last of the thresholds, ascending from 0, that accepts each score; of the shape of ``scores``."""
    return np.searchsorted(thresholds, scores, "right") - 1
