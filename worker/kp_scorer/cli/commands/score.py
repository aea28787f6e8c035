"""``kp-scorer score``: score files offline, in process."""

from collections import Counter

import click

from kp_scorer.cli.converting import Conversion, converting_options
from kp_scorer.cli.display import DecisionTable
from kp_scorer.cli.gathering import score_lines
from kp_scorer.cli.input import ReadAhead
from kp_scorer.cli.options import files_argument, settings_options
from kp_scorer.cli.output import OWN_SHARE, print_note, print_row, refusal
from kp_scorer.decision import Decision
from kp_scorer.settings import Settings
from kp_scorer.trace import ReasoningTrace


@click.command(epilog="Example: kp-scorer score traces.jsonl.gz > decisions.jsonl")
@files_argument
@settings_options
@converting_options
def score(files: tuple[str, ...], settings: Settings, conversion: Conversion) -> bool:
    """Score the traces in FILE (a folder, or - for standard input) offline, in order, beginning with an empty cache.

    FILE is JSON Lines or JSON documents, compressed or not. Logs of other tools are converted. Prints the decisions in the
    order of the input: as JSON Lines, or on a terminal as a table. Invalid lines are reported by number and field.
    """
    batches = ReadAhead(files, settings.limits, settings.worker.batch_size, conversion).batches()
    table = DecisionTable(has_tasks=True)
    done, outcomes = 0, Counter[str]()
    try:
        for line, result in score_lines(batches, settings):
            done += 1
            if isinstance(result, Decision):
                outcomes[result.outcome] += 1
                objective = line.trace.task.objective if isinstance(line.trace, ReasoningTrace) else ""
                table.print_row(result.model_dump(mode="json"), result, objective)
            else:
                print_row(refusal(line.number, result, line.file), "")
    except KeyboardInterrupt:
        print_note(f"scored {outcomes.total()} of {done} so far")
        raise
    scored = f"scored {outcomes.total()} of {done}: {outcomes['accepted']} accepted"
    print_note(scored if done else f"no traces in {', '.join(files)}")
    if outcomes["rejected"] > outcomes["accepted"] and settings.routing.gate == "score":
        print_note(OWN_SHARE)
    return outcomes.total() < done
