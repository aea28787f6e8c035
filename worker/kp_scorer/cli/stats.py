"""``kp-scorer stats``: counts of submissions, and what the queues hold."""

from typing import get_args

import click

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import waiting
from kp_scorer.broker.queues import results_queue, submission_queues
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json
from kp_scorer.decision import Outcome
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer stats")
@service_options
def stats(settings: Settings) -> None:
    """Print one JSON line: how many submissions there were and what became of them, and what the queues hold.

    Always submitted = pending + decided + dead. A trace from another producer counts once a worker has taken it.
    """
    with Store.open(settings) as store:
        counts = store.ledger.counts()
    queues = [submission_queues(settings).traces, *(results_queue(settings, outcome) for outcome in get_args(Outcome))]
    with make_celery(settings) as app:
        print_json({**counts._asdict(), "waiting": {queue.name: waiting(app, queue) for queue in queues}})
