"""What waits: on the queues of submissions, on those of decisions, and in the ledger; and how full that makes Redis."""

from collections.abc import Mapping
from typing import NamedTuple

from celery import Celery

from kp_scorer.broker.publishing import waiting
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.results import unread
from kp_scorer.settings import Settings
from kp_scorer.store import Store


class Backlog(NamedTuple):
    """How much waited when it was looked at."""

    submissions: Mapping[str, int]
    """Messages on the queue of traces and on the intake queue, by name; none that a worker has in hand counts."""
    decisions: Mapping[str, int]
    """Unread decisions, by queue or stream."""
    full: tuple[str, ...]
    """Which of those take no more."""
    pending: int
    """Submissions that the ledger knows of and that have not ended."""
    oldest_pending_s: float
    """How long ago the one of these was sent that was sent first; 0 where there is none."""
    redis_used: float | None
    """Of the memory that Redis may take, the share that is taken; 0 where it may take all, None where it does not say."""


def look_at_backlog(app: Celery, settings: Settings, store: Store) -> Backlog:
    """Look at what waits, in a round trip for each queue.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker or Redis cannot be reached.
    """
    traces, _, intake = submission_queues(settings)
    decisions = unread(app, settings, store)
    return Backlog(
        submissions={queue.name: waiting(app, queue) for queue in (traces, intake) if queue is not None},
        decisions=decisions,
        full=tuple(name for name, count in decisions.items() if settings.queues.is_full(count)),
        pending=store.ledger.counts().pending,
        oldest_pending_s=store.ledger.oldest_pending_s(),
        redis_used=store.memory_used(),
    )
