"""``kp-scorer serve``: the HTTP server."""

import click

from kp_scorer.cli.options import service_options
from kp_scorer.errors import SettingsError
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer serve --set serve.confidence=0.8 --set serve.success=true")
@service_options
def serve(settings: Settings) -> None:
    """Take traces and OpenTelemetry spans over HTTP, and answer with decisions, until SIGTERM or Ctrl-C.

    POST /v1/traces is where exporters of OpenTelemetry send; POST /traces takes JSON; GET /traces/ID has the decision.
    """
    try:
        from kp_scorer.serve.server import serve as serve_until_stopped
    except ModuleNotFoundError as error:
        raise SettingsError(f"serve: there is no {error.name}: install kp-scorer[serve]") from None
    serve_until_stopped(settings)
