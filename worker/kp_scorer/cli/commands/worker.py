"""``kp-scorer worker`` and ``serve``: run a worker, or the server, in the foreground."""

import warnings

import click
from celery.platforms import SecurityWarning

from kp_scorer.app import create_app
from kp_scorer.cli.options import service_options
from kp_scorer.errors import SettingsError
from kp_scorer.logs import configure_logs
from kp_scorer.settings import Settings


@click.command(epilog="Example: KP_BROKER_URL=redis://queue:6379/0 kp-scorer worker")
@service_options
def worker(settings: Settings) -> int:
    """Run one worker in the foreground, against the configured broker and Redis, until SIGTERM or Ctrl-C.

    It finishes what it has in flight before it ends.
    """
    app = create_app(settings)
    # Celery warns against running as root, because of pickle. Workers accept only JSON, and in containers root is common.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    # Celery's command would first look for another app, which a variable APP may name.
    process = app.Worker(quiet=True)
    process.start()
    return int(process.exitcode or 0)


@click.command(epilog="Example: kp-scorer serve --set serve.confidence=0.8 --set serve.success=true")
@service_options
def serve(settings: Settings) -> None:
    """Take traces over HTTP and OpenTelemetry spans over HTTP or gRPC, and answer with decisions, until SIGTERM or Ctrl-C.

    OpenTelemetry exporters send spans to POST /v1/traces. POST /traces takes traces as JSON. GET /traces/ID returns the
    decision.
    """
    try:
        from kp_scorer.serve.server import serve as serve_until_stopped
    except ModuleNotFoundError as error:
        raise SettingsError(f"serve: there is no {error.name}: install kp-scorer[serve]") from None
    configure_logs(settings.log, in_background=True)
    serve_until_stopped(settings)
