"""``kp-scorer score``: score a file offline, in process."""

import sys

import click

from kp_scorer.cli.display import DecisionTable
from kp_scorer.cli.gathering import score_lines
from kp_scorer.cli.input import ReadAhead
from kp_scorer.cli.options import file_argument, settings_options
from kp_scorer.cli.output import print_note, print_row, refusal
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings


@click.command(epilog="Example: kp-scorer score traces.jsonl.gz > decisions.jsonl")
@file_argument
@settings_options
def score(file: str, settings: Settings) -> None:
    """Score the traces in FILE (- for standard input) in order, offline: no Redis, no broker, an empty cache to start with.

    FILE is JSON Lines or one JSON document, and may be gzipped. Prints the decisions in the order of the input, as it comes in:
    as JSON Lines, or to a terminal as a table. Invalid lines are reported by number and field; the others are scored.
    """
    lines = ReadAhead(file, settings.limits, settings.worker.batch_size)
    table = DecisionTable()
    done = scored = 0
    for line, result in score_lines(lines.batches(), lines.total, settings):
        done += 1
        scored += isinstance(result, Decision)
        if isinstance(result, Decision):
            table.print_row(result.model_dump(mode="json"), result.trace_id, "", result)
        else:
            print_row(refusal(line.number, result), "")
    if not done:
        print_note(f"no traces in {file}")
    if scored < done:
        sys.exit(1)
