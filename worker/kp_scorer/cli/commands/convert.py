"""``kp-scorer convert``: convert logs of other tools to traces."""

import click

from kp_scorer.cli.converting import Conversion, converting_options
from kp_scorer.cli.input import read_files
from kp_scorer.cli.options import files_argument, settings_options
from kp_scorer.cli.output import json_line, print_note, print_text, refusal
from kp_scorer.errors import InvalidTrace
from kp_scorer.settings import Settings


@click.command(
    epilog="Example: kp-scorer convert chats.jsonl --confidence 0.8 --domain code --success-field reward "
    "--created-at 2026-01-31T12:00Z > traces.jsonl"
)
@files_argument
@settings_options
@converting_options
def convert(files: tuple[str, ...], settings: Settings, conversion: Conversion) -> bool:
    """Convert the logs of other tools in FILE (a folder, or - for standard input) to traces that `score` and `submit` read.

    FILE is JSON Lines or JSON documents, compressed or not. Prints traces as JSON Lines, and passes on those that are traces
    already. Records that cannot be converted are reported on stderr by line and field, and do not stop the others.
    """
    done = refused = 0
    for line in read_files(files, settings.limits, conversion):
        done += 1
        if isinstance(line.trace, InvalidTrace):
            refused += 1
            refusal(line.number, line.trace, line.file)
        else:
            # The line may have fields that traces lack, and these may hold NaN.
            print_text(json_line(line.document, allow_nan=True))
    if not done:
        print_note(f"nothing to convert in {', '.join(files)}")
    return refused > 0
