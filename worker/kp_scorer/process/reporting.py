"""How a worker is, put together from what its parts say, and what it tells all of it by Redis."""

from collections.abc import Mapping
from typing import NamedTuple

from kp_scorer.broker.backlog import Backlog
from kp_scorer.decision import Outcome
from kp_scorer.process.observer import Figures, Spread
from kp_scorer.store import Timed, WorkerReport


class Condition(NamedTuple):
    """How a worker is at the moment."""

    not_ready: tuple[str, ...]
    """Why it takes no work; empty if it does."""
    in_hand: int
    """Messages."""
    embedder: Mapping[str, str]
    """Its name, engine and space; empty without one."""
    window_entries: int
    """Entries of the novelty log that its mirror holds."""
    mirror_lag_s: float
    """How long ago it was last at the log's end."""
    backlog: Backlog | None
    """None before it was first looked at."""
    backlog_age_s: float
    """Since it was last looked at, or since the worker began."""


def report_of(node: str, figures: Figures, condition: Condition) -> WorkerReport:
    """What the worker ``node`` says of itself."""
    decisions: dict[Outcome, dict[str, int]] = {}
    for (outcome, domain), count in figures.decisions.items():
        if count:
            decisions.setdefault(outcome, {})[domain] = count
    return WorkerReport(
        node=node,
        not_ready=condition.not_ready,
        embedder=" ".join(filter(None, (condition.embedder.get("embedder"), condition.embedder.get("engine")))),
        in_hand=condition.in_hand,
        window_entries=condition.window_entries,
        decisions=decisions,
        dead_letters=sum(figures.dead_letters.values()),
        redeliveries=figures.redeliveries,
        resends=figures.resends,
        queued=_timed(figures.queued_s),
        held=_timed(figures.held_s),
        embedded=_timed(figures.embed_s),
    )


def _timed(spread: Spread) -> Timed:
    return Timed(count=spread.count, seconds=spread.total)
