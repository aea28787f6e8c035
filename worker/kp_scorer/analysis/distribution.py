"""How values between 0 and 1 are spread."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

BINS: Final = 20
"""How many bins a histogram has, all equally wide; an even threshold such as 0.75 lies between two of them."""


class Quantiles(NamedTuple):
    """The values below which a tenth, a quarter, half, three quarters and nine tenths lie."""

    p10: float
    p25: float
    p50: float
    p75: float
    p90: float


class Distribution(NamedTuple):
    """How values are spread."""

    counts: tuple[int, ...]
    """How many lie in each of the bins; a value between two bins is in the upper one, and 1 in the last."""
    quantiles: Quantiles


def histogram(values: Sequence[float]) -> tuple[int, ...]:
    """How many values, 0..1, lie in each bin."""
    counts, _ = np.histogram(np.asarray(values, dtype=np.float64), bins=np.arange(BINS + 1) / BINS)
    return tuple(counts.tolist())


def quantiles(values: Sequence[float]) -> Quantiles:
    """The quantiles of values, of which there must be one at least."""
    return Quantiles(*np.quantile(np.asarray(values, dtype=np.float64), (0.1, 0.25, 0.5, 0.75, 0.9)).tolist())


def distribution(values: Sequence[float]) -> Distribution:
    """How values, 0..1, are spread, of which there must be one at least."""
    return Distribution(histogram(values), quantiles(values))
