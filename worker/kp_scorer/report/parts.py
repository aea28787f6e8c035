"""Which parts a report has, whatever it is made of."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kp_scorer.analysis.tempo import Throughput
from kp_scorer.analysis.whole import Analysis

Part = TypeVar("Part")


def parts(
    analysis: Analysis,
    always: Iterable[Callable[[Analysis], Part]],
    *,
    flips: Callable[[Analysis], Part],
    letters: Callable[[Analysis], Part],
    tempo: Callable[[Analysis, Throughput], Part],
) -> Iterator[Part]:
    """Make the parts that are always there, and then those that the analysis has something for."""
    yield from (make(analysis) for make in always)
    if analysis.has_shadow:
        yield flips(analysis)
    if analysis.letters:
        yield letters(analysis)
    if analysis.throughput:
        yield tempo(analysis, analysis.throughput)
