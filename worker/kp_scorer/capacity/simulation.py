"""A fleet at random arrivals, event by event: how long traces take from submitting to their published decisions."""

import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kp_scorer.capacity.fleet import Fleet

_IN_HAND: Final = 96
"""What a worker takes before it has decided what it has (``worker.concurrency``)."""
_BATCH: Final = 32
"""What it decides together (``worker.batch_size``)."""


@dataclass(slots=True)
class _Batch:
    came: list[float]
    """When its traces were submitted, in seconds."""
    left: float
    """Core seconds that are still to be done."""
    cores: float
    """Cores that it can use."""
    together: bool
    """Whether its threads embed each text together, instead of a text each."""


@dataclass(slots=True)
class _Worker:
    waiting: deque[tuple[float, float]] = field(default_factory=deque)
    """When each trace in hand was submitted, and its core seconds."""
    batch: _Batch | None = None

    @property
    def in_hand(self) -> int:
        return len(self.waiting) + (len(self.batch.came) if self.batch else 0)


class Arrival(NamedTuple):
    """A trace that is submitted."""

    gap_s: float
    """Seconds since the one before."""
    tokens: float
    """Of its text; at most 512 count."""


def at_random(rate: float, tokens: Sequence[int], traces: int, seed: int = 1) -> list[Arrival]:
    """So many traces that come independently of each other, ``rate`` a second on average, each as long as one of ``tokens``."""
    chance = random.Random(seed)  # noqa: S311  # no secret depends on it
    return [Arrival(chance.expovariate(rate), chance.choice(tokens)) for _ in range(traces)]


def latencies_s(fleet: Fleet, arrivals: Iterable[Arrival]) -> list[float]:
    """Seconds from submitting to publishing for each trace, in the order in which they end.

    Workers take traces in turns; each decides what it has, up to a batch, and traces that come meanwhile wait for the next one.
    Batches share the cores equally. What is before and after deciding takes no core, and ``Costs.batch_wait_ms``.

    Args:
        fleet: the workers; ``fleet.tokens`` is not used.
        arrivals: fewer a second than ``fleet.throughput``, or they take ever longer.
    """
    costs = fleet.costs
    workers = [_Worker() for _ in range(fleet.workers)]
    turn = deque(workers)
    queue: deque[tuple[float, float]] = deque()
    took: list[float] = []
    coming = iter(arrivals)
    next_one = next(coming, None)
    now, until_arrival = 0.0, next_one.gap_s if next_one else math.inf
    busy: list[_Worker] = []
    while next_one or busy:
        speeds = _speeds([worker.batch for worker in busy if worker.batch], fleet)
        left_s = [worker.batch.left / speed for worker, speed in zip(busy, speeds, strict=True) if worker.batch]
        # Spans, not moments: late in a long simulation what is left of a batch is less than the last bit of the time.
        span_s = min([until_arrival, *left_s])
        now += span_s
        until_arrival -= span_s
        if next_one and until_arrival <= 0:
            queue.append((now, costs.core_ms(next_one.tokens) / 1_000))
            next_one = next(coming, None)
            until_arrival = next_one.gap_s if next_one else math.inf
        for worker, speed, left in zip(busy, speeds, left_s, strict=True):
            assert worker.batch
            if left <= span_s:
                took += [now - came + costs.batch_wait_ms / 1_000 for came in worker.batch.came]
                worker.batch = None
            else:
                worker.batch.left -= span_s * speed
        _take(queue, turn)
        for worker in workers:
            if worker.batch is None and worker.waiting:
                worker.batch = _next_batch(worker, fleet)
        busy = [worker for worker in workers if worker.batch]
    return took


def _take(queue: deque[tuple[float, float]], turn: deque[_Worker]) -> None:
    """Have those who have room take what waits, one after the other: who took last is the last to take again."""
    for _ in range(len(turn)):
        if not queue:
            return
        worker = turn[0]
        turn.rotate(-1)
        for _ in range(min(_BATCH, _IN_HAND - worker.in_hand, len(queue))):
            worker.waiting.append(queue.popleft())


def _next_batch(worker: _Worker, fleet: Fleet) -> _Batch:
    some = [worker.waiting.popleft() for _ in range(min(_BATCH, len(worker.waiting)))]
    work = sum(seconds for _, seconds in some)
    cores = float(fleet.threads)
    together = len(some) < fleet.threads
    if together:
        # A few texts are embedded by all threads together, which loses something.
        cores *= fleet.costs.alone
    elif len(some) > 1:
        # Side by side, the last text ends later than the others: the longest cannot be divided.
        longest = max(seconds for _, seconds in some)
        cores = work / max(work / fleet.threads + longest * (fleet.threads - 1) / fleet.threads / 2, longest)
    return _Batch([came for came, _ in some], work, cores, together)


def _speeds(batches: Sequence[_Batch], fleet: Fleet) -> list[float]:
    """Core seconds a second for each batch."""
    wanted = sum(batch.cores for batch in batches)
    if wanted <= fleet.cores:
        return [batch.cores for batch in batches]
    # Threads that embed a text together wait for the one whose core another worker has just taken.
    share = fleet.cores / wanted
    return [batch.cores * share * (fleet.costs.crowded if batch.together else 1.0) for batch in batches]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
