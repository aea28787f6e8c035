"""``kp-scorer status``: what became of traces, one by one."""

import sys

import click

from kp_scorer.cli.ids import whole_trace_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_status
from kp_scorer.client.settling import status_of
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer status 4f1c20a9")
@click.argument("trace_ids", metavar="ID...", nargs=-1, required=True)
@service_options
def status(trace_ids: tuple[str, ...], settings: Settings) -> None:
    """Print what is known of traces, a JSON line each: pending, decided with the decision, dead with the reason, or unknown.

    The beginning of an id will do where no other trace has it; kp:trace: may be left out. Exits with 0 only if all are decided.
    """
    with Store.open(settings) as store:
        whole_ids = [whole_trace_id(trace_id, store.ledger) for trace_id in trace_ids]
        records = store.ledger.look_up(whole_ids)
    found = [status_of(trace_id, record) if record else None for trace_id, record in zip(whole_ids, records, strict=True)]
    for trace_id, known in zip(whole_ids, found, strict=True):
        print_status(trace_id, known)
    if not all(known and known.state == "decided" for known in found):
        sys.exit(1)
