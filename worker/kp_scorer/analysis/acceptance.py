"""What each threshold would accept."""

from collections.abc import Sequence
from typing import Final

import numpy as np

THRESHOLDS: Final = tuple(number / 100 for number in range(101))
"""Every threshold that one would write down, from 0 to 1."""


def accepted_at(scores: Sequence[float]) -> tuple[int, ...]:
    """How many of the scores each of ``THRESHOLDS`` accepts."""
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    return tuple((ordered.size - np.searchsorted(ordered, THRESHOLDS, "left")).tolist())


def lowest_threshold(accepted: Sequence[int], share: float) -> float | None:
    """The lowest of ``THRESHOLDS`` that accepts at most a ``share``, 0..1, of all; None if even 1 accepts more.

    ``accepted`` is what :func:`accepted_at` returns.
    """
    # At 0 all are accepted.
    most = share * accepted[0]
    return next((threshold for threshold, count in zip(THRESHOLDS, accepted, strict=True) if count <= most), None)
