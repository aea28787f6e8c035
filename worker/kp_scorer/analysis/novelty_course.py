"""How novelty goes as more and more traces come."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.decision import Decision

_MOST_STRETCHES: Final = 40
_FEWEST_IN_ONE: Final = 12
_MOST_POINTS: Final = 600


class Stretch(NamedTuple):
    """Traces that came one after the other, and the quartiles of their novelty."""

    first: int
    """The place of the first of them in the order, from 1."""
    last: int
    p25: float
    p50: float
    p75: float


class Point(NamedTuple):
    """The novelty of one trace."""

    place: int
    """Its place in the order, from 1."""
    novelty: float


class Course(NamedTuple):
    """The novelty of traces in their order."""

    stretches: tuple[Stretch, ...]
    """All traces, in stretches of equal length but for one trace."""
    points: tuple[Point, ...]
    """Some of them, evenly spaced: all, unless they are more than can be told apart."""


def novelty_course(decisions: Sequence[Decision]) -> Course:
    """The course of novelty through decisions in the order of their traces; empty if none was compared with any."""
    measured = np.array([each.dimensions.novelty for each in decisions if each.novelty.source != "no_embedder"])
    if not measured.size:
        return Course((), ())
    parts = np.array_split(measured, min(_MOST_STRETCHES, max(1, measured.size // _FEWEST_IN_ONE)))
    ends = np.cumsum([part.size for part in parts]).tolist()
    stretches = (
        Stretch(end - part.size + 1, end, *np.quantile(part, (0.25, 0.5, 0.75)).tolist())
        for part, end in zip(parts, ends, strict=True)
    )
    chosen = range(0, measured.size, -(-measured.size // _MOST_POINTS))
    return Course(tuple(stretches), tuple(Point(index + 1, float(measured[index])) for index in chosen))
