"""``kp-scorer score`` and ``keep``: score files offline, in process, and write the traces that are accepted."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kp_scorer.cli.converting import Conversion, Line, converting_options
from kp_scorer.cli.display import DecisionTable
from kp_scorer.cli.gathering import Result, score_lines
from kp_scorer.cli.input import ReadAhead
from kp_scorer.cli.options import files_argument, ledger_options, settings_options
from kp_scorer.cli.output import json_line, open_output, print_note, print_row, refusal
from kp_scorer.decision import Decision
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer score traces.jsonl.gz > decisions.jsonl")
@files_argument
@settings_options
@converting_options
def score(files: tuple[str, ...], settings: Settings, conversion: Conversion) -> None:
    """Score the traces in FILE (- for standard input) in order, offline: no Redis, no broker, an empty cache to start with.

    FILE is JSON Lines or JSON documents, gzipped or not. What others recorded is converted. Prints the decisions in the order
    of the input, as it comes in: as JSON Lines, or to a terminal as a table. Invalid lines are reported by number and field.
    """
    batches = ReadAhead(files, settings.limits, settings.worker.batch_size, conversion).batches()
    table = DecisionTable()
    done = scored = 0
    for line, result in score_lines(batches, settings):
        done += 1
        scored += isinstance(result, Decision)
        if isinstance(result, Decision):
            table.print_row(result.model_dump(mode="json"), result)
        else:
            print_row(refusal(line.number, result, line.file), "")
    print_note(f"scored {scored} of {done}" if done else f"no traces in {', '.join(files)}")
    if scored < done:
        sys.exit(1)


@click.command(epilog="Example: kp-scorer keep traces.jsonl --output kept.jsonl")
@files_argument
@click.option("--output", type=click.Path(allow_dash=True), default="-", help="Where to write, in place of stdout.")
@click.option("--stored", is_flag=True, help="Choose by the decisions that the ledger holds; nothing is scored.")
@click.option("--review", "outcome", flag_value="review", default="accepted", help="Keep what goes to review.")
@click.option("--rejected", "outcome", flag_value="rejected", help="Keep what is rejected.")
@ledger_options
@converting_options
def keep(files: tuple[str, ...], output: str, stored: bool, outcome: str, settings: Settings, conversion: Conversion) -> None:
    """Write the traces in FILE that are accepted, as they are but for metadata.quality_score, which becomes their score.

    They are scored offline and in order, as by `score`. Each trace is written once, as JSON Lines, as soon as it is decided.
    Lines that are invalid, and with --stored traces without a decision, are left out, named on stderr, and exit 1.
    """
    if output != "-" and any(Path(output).resolve().is_relative_to(Path(name).resolve()) for name in files):
        raise click.BadParameter("it lies where traces are read: name a file elsewhere", param_hint="--output")
    batches = ReadAhead(files, settings.limits, settings.worker.batch_size, conversion).batches()
    results = _stored(batches, settings) if stored else score_lines(batches, settings)
    counts: Counter[str] = Counter()
    kept_ids: set[str] = set()
    with open_output(output) as write:
        for line, result in results:
            match result:
                case Decision():
                    counts[result.outcome] += 1
                    if result.outcome == outcome and result.trace_id not in kept_ids:
                        kept_ids.add(result.trace_id)
                        document = line.document
                        if result.checks and not isinstance(line.trace, InvalidTrace):
                            # No check has seen fields that a trace does not have.
                            document = line.trace.model_dump(mode="json", exclude_unset=True)
                        scored = {**document, "metadata": {**document["metadata"], "quality_score": result.score}}
                        # What no field is for may hold NaN, as it was read.
                        write(json_line(scored, allow_nan=True))
                case str():
                    counts[result] += 1
                case _:
                    counts["refused"] += 1
                    refusal(line.number, result, line.file)
    numbers = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    print_note(f"kept {len(kept_ids)} of {counts.total()}: {numbers}" if counts else f"no traces in {', '.join(files)}")
    if outcome == "accepted" and counts["rejected"] > len(kept_ids):
        print_note("to keep a share that you choose: `kp-scorer calibrate`, then --config with the thresholds that it writes")
    if counts.keys() - {"accepted", "review", "rejected"}:
        sys.exit(1)


def _stored(batches: Iterator[Sequence[Line]], settings: Settings) -> Iterator[tuple[Line, Result | str]]:
    """What the ledger decided on the traces on lines of an input, in order, or the state in which it has them."""
    with Store.open(with_endpoints(settings)) as store:
        for batch in batches:
            trace_ids = [line.trace.id for line in batch if not isinstance(line.trace, InvalidTrace)]
            records = iter(store.ledger.look_up(trace_ids))
            for line in batch:
                if isinstance(line.trace, InvalidTrace):
                    yield line, line.trace
                elif (record := next(records)) and record.digest != line.trace.digest():
                    yield line, TraceConflict(line.trace.id)
                else:
                    yield line, (record.decision or record.state) if record else "unknown"
