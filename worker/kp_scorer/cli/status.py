"""``kp-scorer status``: what became of traces, one by one."""

import sys

import click

from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_status
from kp_scorer.client import Client
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer status kp:trace:4f1c…")
@click.argument("trace_ids", metavar="ID...", nargs=-1, required=True)
@service_options
def status(trace_ids: tuple[str, ...], settings: Settings) -> None:
    """Print what is known of traces, a JSON line each: pending, decided with the decision, dead with the reason, or unknown.

    Exits with 0 only if all are decided.
    """
    with Client(settings) as client:
        found = client.look_up(trace_ids)
    for trace_id, known in zip(trace_ids, found, strict=True):
        print_status(trace_id, known)
    if not all(known and known.state == "decided" for known in found):
        sys.exit(1)
