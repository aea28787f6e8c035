"""``kp-scorer forget``: erase the stored data of a trace."""

import sys

import click

from kp_scorer.cli.ids import exact_trace_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_note, print_row
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c20a9-7d0e-4f3b-9c55-2b1f6f0d8a11")
@click.argument("trace_id")
@service_options
def forget(trace_id: str, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters; exits 1 if nothing is kept of it.

    TRACE_ID is exact; kp:trace: may be left out.

    Workers drop the vector with their next batch, idle workers within half a second. A trace that waits on a queue is scored.
    """
    trace_id = exact_trace_id(trace_id)
    with Store.open(settings) as store:
        vectors = sum(log.erase(trace_id) for log in store.novelty_logs())
        dropped = sum(store.dead_letters.drop(each) for each in store.dead_letters.read() if each.trace_id == trace_id)
        records = store.ledger.erase(trace_id)
    print_row({"trace_id": trace_id, "vectors": vectors, "records": records, "dead_letters": dropped})
    if not (vectors or records or dropped):
        print_note(f"{trace_id}: nothing is kept of this trace: it is unknown, or what was kept has expired")
        sys.exit(1)
    print_note(f"erased {trace_id}")
    if settings.results.with_trace:
        print_note("what was published carries the trace: have its readers erase it")
