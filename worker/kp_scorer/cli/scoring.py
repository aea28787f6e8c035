"""Scoring an input offline, as it comes in, with progress for people."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from kp_scorer.cli.input import Line
from kp_scorer.cli.output import progress, say_if_unmeasured
from kp_scorer.decider import Decider
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.offline import decide_offline, offline_decider
from kp_scorer.settings import Settings

Total = Callable[[], tuple[int | None, bool]]

Scored = tuple[Line, Decision | InvalidTrace | TraceConflict]
"""A line of the input, and its decision or why it has none."""


def score_lines(batches: Iterable[Sequence[Line]], total: Total, settings: Settings) -> Iterator[Scored]:
    """Score the traces on lines of an input, in order; an embedder is loaded once there is one.

    Args:
        batches: lines that are scored together.
        total: tells how many lines there will be, None while nothing can be said, and whether that is an estimate.
        settings: how to score.

    Raises:
        SettingsError: an embedder is required and cannot be loaded.
    """
    decider: Decider | None = None
    done = 0
    is_first = True
    with progress("scored") as advance:
        for batch in batches:
            decider = decider or offline_decider(settings)
            for line, found in _decided(decider, batch):
                if is_first and isinstance(found, Decision):
                    is_first = False
                    say_if_unmeasured(found)
                yield line, found
            done += len(batch)
            advance(done, *total())
        if done:
            advance(done, done)


def _decided(decider: Decider, batch: Sequence[Line]) -> Iterator[Scored]:
    decided = decide_offline(decider, [line.trace for line in batch if not isinstance(line.trace, InvalidTrace)])
    for line in batch:
        if isinstance(line.trace, InvalidTrace):
            yield line, line.trace
            continue
        found = next(decided)
        # A ledger in memory knows of no other workers and of no deaths.
        assert isinstance(found, Decision | TraceConflict)
        yield line, found
