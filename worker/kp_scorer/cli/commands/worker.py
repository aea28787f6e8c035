"""``kp-scorer worker``: run one scorer in the foreground."""

import sys
import warnings

import click
from celery.platforms import SecurityWarning

from kp_scorer.app import create_app
from kp_scorer.cli.options import service_options
from kp_scorer.settings import Settings


@click.command(epilog="Example: KP_BROKER_URL=redis://queue:6379/0 kp-scorer worker")
@service_options
def worker(settings: Settings) -> None:
    """Run one worker in the foreground, against the configured broker and Redis, until SIGTERM or Ctrl-C.

    It finishes what it has in flight before it ends.
    """
    app = create_app(settings)
    # Celery warns against running as root, because of pickle; we accept only JSON, and in a container root is common.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # Celery's command would first look for another app, as named by a variable APP.
    process = app.Worker(quiet=True)
    process.start()
    sys.exit(process.exitcode)
