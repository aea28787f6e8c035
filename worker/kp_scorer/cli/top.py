"""``kp-scorer top``: watch the workers and the queues."""

import time
from contextlib import suppress

import click
from celery import Celery
from rich.console import Console
from rich.live import Live

from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import console
from kp_scorer.cli.view import Look, view
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer top --every 5")
@click.option("--once", is_flag=True, help="Show it once; so it is where stderr is no terminal, too.")
@click.option(
    "--every", "every_s", type=click.FloatRange(min=0.5), default=2.0, show_default=True, help="Seconds between looks."
)
@service_options
def top(once: bool, every_s: float, settings: Settings) -> None:
    """Watch all workers and queues on stderr until Ctrl-C: what waits, how fast it is decided, who decides it, what is wrong.

    Rates and times are of the last seconds; decisions by domain, and what each worker has done, since it started.
    """
    out = console()
    with Store.open(settings) as store, make_celery(settings) as app:
        first = _look(app, settings, store)
        if once or not out.is_terminal:
            out.print(view(first, None))
            return
        with suppress(KeyboardInterrupt):
            _watch(out, first, app, settings, store, every_s)


def _watch(out: Console, first: Look, app: Celery, settings: Settings, store: Store, every_s: float) -> None:
    now, before, problem = first, None, ""
    with Live(view(first, None), console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every_s)
            try:
                now, before, problem = _look(app, settings, store), now, ""
            except ServiceUnavailable as error:
                # What was seen last stays, and it is looked again.
                problem = str(error)
            live.update(view(now, before, problem), refresh=True)


def _look(app: Celery, settings: Settings, store: Store) -> Look:
    """Look at everything.

    Raises:
        SettingsError: RabbitMQ has a queue of this name with other arguments.
        ServiceUnavailable: the broker or Redis cannot be reached.
    """
    backlog = look_at_backlog(app, settings, store)
    dropped = sum(store.drops.counts().values())
    return Look(time.monotonic(), store.ledger.counts(), backlog, dropped, store.workers.reports())
