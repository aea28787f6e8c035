"""``kp-scorer forget``: erase what is kept of a trace."""

import sys

import click

from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json, say
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer forget kp:trace:4f1c…")
@click.argument("trace_id")
@service_options
def forget(trace_id: str, settings: Settings) -> None:
    """Erase a trace: its vector, its record with the decision, its dead letters.

    Workers drop the vector with their next batch, idle workers within half a second.

    What is on a queue is not touched: a trace still waiting there is scored when its turn comes. Exits 1 if nothing is kept
    of the trace.
    """
    with Store.open(settings) as store:
        vectors = sum(log.erase(trace_id) for log in store.novelty_logs())
        letters = sum(store.dead_letters.drop(letter) for letter in store.dead_letters.read() if letter.trace_id == trace_id)
        records = store.ledger.erase(trace_id)
    print_json({"trace_id": trace_id, "vectors": vectors, "records": records, "dead_letters": letters})
    if not (vectors or records or letters):
        say("nothing is kept of this trace: it is unknown, or what was kept has expired")
        sys.exit(1)
