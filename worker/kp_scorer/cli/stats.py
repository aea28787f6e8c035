"""``kp-scorer stats``: counts of submissions, and what the queues hold."""

from typing import Any

import click

from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.oversized import count_oversized
from kp_scorer.broker.queues import submission_queues
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
    with Store.open(settings) as store, make_celery(settings) as app:
        row: dict[str, Any] = store.ledger.counts()._asdict()
        row["dropped"] = store.drops.counts()
        backlog = look_at_backlog(app, settings, store)
        row["waiting"] = {**backlog.submissions, **backlog.decisions}
        if settings.broker.is_redis:
            row["oversized"] = count_oversized(app, submission_queues(settings).traces)
    row["full"] = list(backlog.full)
    print_json(row)
