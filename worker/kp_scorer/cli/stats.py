"""``kp-scorer stats``: counts of submissions, and what the queues hold."""

from typing import Any

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.oversized import count_oversized
from kp_scorer.broker.publishing import waiting
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.results import unread
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer stats")
@service_options
def stats(settings: Settings) -> None:
    """Print one JSON line: how many submissions there were and what became of them, and what the queues hold.

    Always submitted = pending + decided + dead. A trace from another producer counts once a worker has taken it.
    Full are the results queues and streams with queues.results_limit unread decisions; dropped are decisions, by queue or
    stream, and dead letters that made room for others. On a stream is unread what some consumer group has not acknowledged.
    With Redis as the broker, oversized is how many messages too large for a worker are kept in the list traces.oversized.
    """
    with Store.open(settings) as store:
        row: dict[str, Any] = store.ledger.counts()._asdict()
        row["dropped"] = store.drops.counts()
    traces, _, intake = submission_queues(settings)
    with make_celery(settings) as app:
        results = unread(app, settings)
        submitted = {queue.name: waiting(app, queue) for queue in (traces, intake) if queue is not None}
        row["waiting"] = {**submitted, **results}
        if settings.broker.is_redis:
            row["oversized"] = count_oversized(app, traces)
    row["full"] = [name for name, count in results.items() if settings.queues.is_full(count)]
    print_json(row)
