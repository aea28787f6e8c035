"""What a worker has done since it started, in figures: its parts report batches, whoever watches reads."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple, get_args

from kp_scorer.decision import Decision, Outcome, Override
from kp_scorer.errors import REASONS, Reason

OTHER: Final = "other"
"""Stands for every domain that the settings and the profiles do not name: a producer may write any into a trace."""

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1_800.0)
_SCORES: Final = tuple(tenths / 10 for tenths in range(1, 10))
_SIZES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread: how many are at most each bound, the last being infinity, and the sum of all."""

    buckets: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there are."""
        return self.buckets[-1][1]


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def spread(self) -> Spread:
        sums, counted = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            counted += count
            sums.append((bound, counted))
        return Spread(tuple(sums), self._total)


class Ended(NamedTuple):
    """A decision that is published."""

    decision: Decision
    queued_s: float | None
    """How long its submission was on the queue; None if it does not say when it was sent."""
    held_s: float
    """How long the worker had it in hand."""


class Figures(NamedTuple):
    """All that an observer has counted, as of one moment."""

    decisions: dict[tuple[Outcome, str], int]
    """By outcome and domain."""
    overrides: dict[Override, int]
    dead_letters: dict[Reason, int]
    deliveries: int
    redeliveries: int
    resends: int
    tokens: int
    score: Spread
    queued_s: Spread
    held_s: Spread
    batch_traces: Spread
    look_up_s: Spread
    embed_s: Spread
    finish_s: Spread


class Observer:
    """Counts, for any number of threads. Each report takes some microseconds, and nothing that reads holds it up for longer."""

    def __init__(self, domains: Collection[str]) -> None:
        """Tell these domains apart; all others are one."""
        self._domains = frozenset(domains)
        self._lock = threading.Lock()
        # From 0 on: of what is not there, nobody can tell when it begins to grow.
        classes = product(get_args(Outcome), sorted(self._domains | {OTHER}))
        self._decisions: Counter[tuple[Outcome, str]] = Counter(dict.fromkeys(classes, 0))
        self._overrides: Counter[Override] = Counter(dict.fromkeys(get_args(Override), 0))
        self._dead_letters: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))
        self._deliveries = self._redeliveries = self._resends = self._tokens = 0
        self._score = _Histogram(_SCORES)
        self._queued, self._held = _Histogram(_SECONDS), _Histogram(_SECONDS)
        self._batch = _Histogram(_SIZES)
        self._look_up, self._embed, self._finish = _Histogram(_SECONDS), _Histogram(_SECONDS), _Histogram(_SECONDS)

    def counted_as(self, domain: str) -> str:
        """The name by which a domain is counted."""
        return domain if domain in self._domains else OTHER

    def delivered(self, deliveries: int) -> None:
        """A message has come, by so many deliveries."""
        with self._lock:
            self._deliveries += 1
            self._redeliveries += deliveries > 1

    def prepared(self, traces: int, look_up_s: float, embed_s: float, tokens: int) -> None:
        """A batch was looked up, and so many of its traces, of so many tokens, were embedded."""
        with self._lock:
            self._batch.add(traces)
            self._look_up.add(look_up_s)
            self._embed.add(embed_s)
            self._tokens += tokens

    def finished(self, finish_s: float) -> None:
        """A batch was placed in the log, judged and committed."""
        with self._lock:
            self._finish.add(finish_s)

    def published(self, ended: Sequence[Ended]) -> None:
        """Decisions are where their readers find them."""
        with self._lock:
            for decision, queued_s, held_s in ended:
                self._decisions[decision.outcome, self.counted_as(decision.domain)] += 1
                self._overrides.update(fired.name for fired in decision.overrides)
                self._score.add(decision.score)
                self._held.add(held_s)
                if queued_s is not None:
                    self._queued.add(queued_s)

    def buried(self, reason: Reason) -> None:
        """A dead letter is kept."""
        with self._lock:
            self._dead_letters[reason] += 1

    def resent(self) -> None:
        """A submission that was lost is sent again."""
        with self._lock:
            self._resends += 1

    def figures(self) -> Figures:
        """All of it, as of now."""
        with self._lock:
            return Figures(
                dict(self._decisions),
                dict(self._overrides),
                dict(self._dead_letters),
                self._deliveries,
                self._redeliveries,
                self._resends,
                self._tokens,
                self._score.spread(),
                self._queued.spread(),
                self._held.spread(),
                self._batch.spread(),
                self._look_up.spread(),
                self._embed.spread(),
                self._finish.spread(),
            )
