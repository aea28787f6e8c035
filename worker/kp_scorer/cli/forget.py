"""``kp-scorer forget``: erase what is kept of a trace."""

import sys
from collections.abc import Iterator

import click

from kp_scorer.cli.ids import whole_trace_id
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer forget 4f1c20a9")
@click.argument("trace_id")
@service_options
def forget(trace_id: str, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters.

    The beginning of its id will do where no other trace has it; kp:trace: may be left out. It erases one trace or none, and
    says which.

    Workers drop the vector with their next batch, idle workers within half a second.

    What is on a queue is not touched: a trace still waiting there is scored when its turn comes. Exits 1 if nothing is kept
    of the trace.
    """
    with Store.open(settings) as store:
        logs, letters = store.novelty_logs(), list(store.dead_letters.read())

        def kept() -> Iterator[str]:
            # A vector outlives the record by the slack, and a dead letter for weeks.
            yield from (letter.trace_id for letter in letters)
            yield from (entry.trace_id for log in logs for entry in log.entries())

        trace_id = whole_trace_id(trace_id, store.ledger, kept)
        vectors = sum(log.erase(trace_id) for log in logs)
        dropped = sum(store.dead_letters.drop(letter) for letter in letters if letter.trace_id == trace_id)
        records = store.ledger.erase(trace_id)
    print_json({"trace_id": trace_id, "vectors": vectors, "records": records, "dead_letters": dropped})
    if not (vectors or records or dropped):
        say(f"{trace_id}: nothing is kept of this trace: it is unknown, or what was kept has expired")
        sys.exit(1)
    say(f"erased {trace_id}")
