"""``kp-scorer label``: keep in the ledger which traces were good."""

import sys

import click

from kp_scorer.cli.ids import resolve_trace_id
from kp_scorer.cli.labels import read_labels
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import note_damaged, print_note, print_row
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer label 4f1c20a9 good")
@click.argument("trace_id", metavar="[ID", required=False)
@click.argument("judgement", metavar="good|bad]", type=click.Choice(("good", "bad")), required=False)
@click.option("--file", metavar="FILE|-", type=click.Path(allow_dash=True), help="File that says which traces were good.")
@service_options
def label(trace_id: str | None, judgement: str | None, file: str | None, settings: Settings) -> None:
    """Label decided traces as good or bad: one, or those in FILE, as JSON Lines {"trace_id": "kp:trace:…", "good": true}.

    A label is kept as long as the decision, and labelling again replaces it. `calibrate`, `quality` and `report` use it with
    --stored. Without ID and FILE, prints the labels that the ledger holds, as such lines.

    Without kp:trace: the beginning of an ID will do where no other trace has it. Exits 1 if a trace is not decided.
    """
    if (trace_id is None) != (judgement is None) or (trace_id and file):
        raise click.UsageError("expected ID and good or bad, or --file")
    labels = read_labels(file, "--file") if file else {}
    with Store.open(settings) as store:
        if not trace_id and not file:
            for stored in store.ledger.all_decided():
                if stored.good is not None:
                    print_row({"trace_id": stored.decision.trace_id, "good": stored.good})
            sys.exit(1 if note_damaged(store.ledger.damaged) else 0)
        if trace_id:
            labels[resolve_trace_id(trace_id, store.ledger)] = judgement == "good"
        undecided = store.ledger.label(labels)
    for each, state in undecided.items():
        print_row({"trace_id": each, "state": state}, f"{each} {state}")
    print_note(f"labelled {len(labels) - len(undecided)} of {len(labels)}")
    if undecided:
        sys.exit(1)
