"""``kp-scorer forget``: erase the stored data of a trace."""

import sys
from collections.abc import Iterator

import click

from kp_scorer.cli.ids import exact_trace_id, resolve_trace_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, print_note
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c20a9-7d0e-4f3b-9c55-2b1f6f0d8a11")
@click.argument("trace_id")
@click.option("--prefix", is_flag=True, help="TRACE_ID is the beginning of an id, without kp:trace:, that only one trace has.")
@click.option("--yes", is_flag=True, help="Do not ask, with --prefix.")
@service_options
def forget(trace_id: str, prefix: bool, yes: bool, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters; exits 1 if nothing is kept of it.

    TRACE_ID is exact; kp:trace: may be left out. With --prefix its beginning will do, and the command asks before it erases.
    It erases one trace or none, and says which.

    Workers drop the vector with their next batch, idle workers within half a second. A trace that waits on a queue is scored.
    """
    asks = prefix and not yes
    if asks and not sys.stdin.isatty():
        raise click.UsageError("--prefix asks before it erases, and there is no terminal: give the exact id, or --yes")
    with Store.open(settings) as store:
        logs, dead_letters = store.novelty_logs(), list(store.dead_letters.read())

        def trace_ids_elsewhere() -> Iterator[str]:
            # A vector outlives the record by the slack, and a dead letter for weeks.
            yield from (dead_letter.trace_id for dead_letter in dead_letters)
            yield from (entry.trace_id for log in logs for entry in log.entries())

        trace_id = resolve_trace_id(trace_id, store.ledger, trace_ids_elsewhere) if prefix else exact_trace_id(trace_id)
        if asks:
            click.confirm(f"Erase all that is kept of {trace_id}?", abort=True, err=True)
        vectors = sum(log.erase(trace_id) for log in logs)
        dropped = sum(store.dead_letters.drop(dead_letter) for dead_letter in dead_letters if dead_letter.trace_id == trace_id)
        records = store.ledger.erase(trace_id)
    print_json({"trace_id": trace_id, "vectors": vectors, "records": records, "dead_letters": dropped})
    if not (vectors or records or dropped):
        print_note(f"{trace_id}: nothing is kept of this trace: it is unknown, or what was kept has expired")
        sys.exit(1)
    print_note(f"erased {trace_id}")
