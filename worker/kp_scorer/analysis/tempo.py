"""When decisions were made, and how long their batches took."""

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

import numpy as np

from kp_scorer.decision import Decision, Timings

STAGES: Final = ("look_up_ms", "embed_ms", "place_ms")
"""The fields of a decision's timings that say how long a stage took."""

_WIDTHS_S: Final = (1, 2, 5, 10, 30, 60, 300, 900, 3_600, 10_800, 43_200, 86_400, 604_800)
_MOST_SPANS: Final = 100


class Throughput(NamedTuple):
    """How many decisions were made in each span of time."""

    start_s: int
    """When the first span begins, in seconds since 1970."""
    width_s: int
    counts: tuple[int, ...]


class Latency(NamedTuple):
    """How long the batches of traces spent in a stage, in milliseconds: half of the traces at most ``p50``, and so on."""

    stage: str
    p50: float
    p95: float
    p99: float


def throughput(decisions: Sequence[Decision]) -> Throughput | None:
    """How many decisions were made when; None if no decision has a time that can be read."""
    times = [time for decision in decisions if (time := _seconds(decision.decided_at)) is not None]
    if not times:
        return None
    first, last = min(times), max(times)
    width = (
        next((each for each in _WIDTHS_S if (last - first) / each < _MOST_SPANS), 0) or int((last - first) / _MOST_SPANS) + 1
    )
    start = int(first // width * width)
    counted = Counter(int(time - start) // width for time in times)
    return Throughput(start, width, tuple(counted[span] for span in range(max(counted) + 1)))


def latencies(decisions: Sequence[Decision]) -> list[Latency]:
    """How long each stage took, of at least one decision."""
    return [Latency(stage, *_percentiles([decision.timings for decision in decisions], stage)) for stage in STAGES]


def moment(seconds: float) -> datetime:
    """A moment in UTC, from seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)


def _percentiles(timings: Sequence[Timings], stage: str) -> list[float]:
    found: list[float] = np.quantile([getattr(each, stage) for each in timings], (0.5, 0.95, 0.99)).tolist()
    return found


def _seconds(text: str) -> float | None:
    # Files may hold anything, and an axis cannot show all of it.
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() if 1970 < found.year < 9_000 else None
