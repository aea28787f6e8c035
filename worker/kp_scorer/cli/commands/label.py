"""``kp-scorer label``: keep in the ledger which traces were good; and how commands read that from a file."""

import sys
from typing import Any, Final

import click
from pydantic import BaseModel, ValidationError

from kp_scorer.cli.ids import resolve_trace_id
from kp_scorer.cli.input import open_input, read_bytes
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import note_damaged, print_note, print_row
from kp_scorer.ledger import Store
from kp_scorer.settings import Settings

_MOST_BYTES: Final = 2**26


class _Label(BaseModel):
    trace_id: str
    good: bool


def read_labels(_: Any, __: Any, name: str | None) -> dict[str, bool] | None:
    """Read the file of an option: labels by trace id, of lines such as ``{"trace_id": …, "good": true}``."""
    if name is None:
        return None
    try:
        with open_input(name) as stream:
            content = read_bytes(stream.read, _MOST_BYTES + 1)
    except click.BadParameter as error:
        # It names FILE; click names the option.
        raise click.BadParameter(error.message) from None
    if len(content) > _MOST_BYTES:
        raise click.BadParameter(f"expected at most {_MOST_BYTES} bytes")
    labels: dict[str, bool] = {}
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            label = _Label.model_validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors(include_input=False)[0]
            problem = f"{first['loc'][0]}: {first['msg']}" if first["loc"] else "expected a JSON object"
            raise click.BadParameter(f"line {number}: {problem}") from None
        # The latest counts, as in the ledger.
        labels[label.trace_id] = label.good
    return labels


labels_option = click.option(
    "--labels", callback=read_labels, type=click.Path(allow_dash=True), help="File that says which traces were good."
)


@click.command(epilog="Example: kp-scorer label 4f1c20a9 good")
@click.argument("trace_id", metavar="[ID", required=False)
@click.argument("judgement", metavar="good|bad]", type=click.Choice(("good", "bad")), required=False)
@click.option("--file", "labels", metavar="FILE|-", callback=read_labels, help="File that says which traces were good.")
@service_options
def label(trace_id: str | None, judgement: str | None, labels: dict[str, bool] | None, settings: Settings) -> None:
    """Label decided traces as good or bad: one, or those in FILE, as JSON Lines {"trace_id": "kp:trace:…", "good": true}.

    A label is kept as long as the decision, and labelling again replaces it. `calibrate`, `quality` and `report` use it with
    --stored. Without ID and FILE, prints the labels that the ledger holds, as such lines.

    Without kp:trace: the beginning of an ID will do where no other trace has it. Exits 1 if a trace is not decided.
    """
    if (trace_id is None) != (judgement is None) or None not in (trace_id, labels):
        raise click.UsageError("expected ID and good or bad, or --file")
    with Store.open(settings) as store:
        if trace_id is None and labels is None:
            for stored in store.ledger.all_decided():
                if stored.good is not None:
                    print_row({"trace_id": stored.decision.trace_id, "good": stored.good})
            sys.exit(1 if note_damaged(store.ledger.damaged) else 0)
        if trace_id is not None:
            labels = {resolve_trace_id(trace_id, store.ledger): judgement == "good"}
        undecided = store.ledger.label(labels or {})
    for each, state in undecided.items():
        print_row({"trace_id": each, "state": state}, f"{each} {state}")
    print_note(f"labelled {len(labels or ()) - len(undecided)} of {len(labels or ())}")
    if undecided:
        sys.exit(1)
