"""Reads the labels of traces from the file that an option names."""

import codecs
from typing import Any, Final

import click
from pydantic import BaseModel, ValidationError

from kp_scorer.cli.output import print_note
from kp_scorer.cli.unpacking import lines_in, open_input

_MOST_LINE_BYTES: Final = 2**20
_MOST_BYTES: Final = 2**26  # The largest file of labels, which are all held in memory.


class _Label(BaseModel):
    trace_id: str
    good: bool


def read_labels(_: Any, __: Any, name: str | None) -> dict[str, bool] | None:
    """Read the file of an option, with lines such as ``{"trace_id": …, "good": true}``; return labels by trace id."""
    if name is None:
        return None
    labels: dict[str, bool] = {}
    size_bytes = contradicting = 0
    try:
        with open_input(name) as stream:
            for number, line in lines_in(stream, _MOST_LINE_BYTES):
                size_bytes += len(line)
                if size_bytes > _MOST_BYTES:
                    raise click.BadParameter(f"expected at most {_MOST_BYTES} bytes")
                try:
                    label = _Label.model_validate_json(line.removeprefix(codecs.BOM_UTF8), strict=True)
                except ValidationError as error:
                    first = error.errors(include_input=False)[0]
                    problem = f"{first['loc'][0]}: {first['msg']}" if first["loc"] else "expected a JSON object"
                    raise click.BadParameter(f"line {number}: {problem}") from None
                contradicting += labels.get(label.trace_id, label.good) != label.good
                # The last one counts, as in the ledger.
                labels[label.trace_id] = label.good
    except click.BadParameter as error:
        # The message names FILE; click names the option.
        raise click.BadParameter(error.message) from None
    if contradicting:
        print_note(f"{contradicting} labels contradict an earlier one of the same trace: the latest counts")
    return labels


labels_option = click.option(
    "--labels", callback=read_labels, type=click.Path(allow_dash=True), help="File with a label for each trace."
)
