"""``kp-scorer keep``: write the traces that are accepted, or the set of traces that covers all of them best."""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click

from kp_scorer.checks.checks import Checks
from kp_scorer.cli.converting import Conversion, Line, converting_options
from kp_scorer.cli.display import progress
from kp_scorer.cli.gathering import Result, score_lines
from kp_scorer.cli.input import ReadAhead, read_files
from kp_scorer.cli.keeping import Candidates, Choice, choices, print_summaries
from kp_scorer.cli.options import files_argument, ledger_options
from kp_scorer.cli.output import json_line, open_output, print_note, refusal
from kp_scorer.decision import Decision
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace

_FILES: Final = "kept-[0-9][0-9][0-9][0-9].jsonl"

Best = float | int


def _best(text: str) -> Best:
    """Parse a share of all traces, such as 10%, or a number of traces, such as 500."""
    try:
        best = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
    except ValueError:
        best = 0
    if best <= 0 or (isinstance(best, float) and best > 1):
        raise click.BadParameter("expected a share of all traces, such as 10%, or a number of them, such as 500")
    return best


@click.command(epilog="Example: kp-scorer keep traces.jsonl --best 10% --output kept.jsonl")
@files_argument
@click.option("--best", type=_best, metavar="SHARE|NUMBER", help="Keep the successes that cover all traces best: 10%, or 500.")
@click.option(
    "--into",
    type=click.Path(file_okay=False),
    help="With --best, a folder that has what was kept before: add what adds.",
)
@click.option("--why", type=click.Path(), help="With --best, a file for a line about each trace: why it is kept or not.")
@click.option("--output", type=click.Path(allow_dash=True), default="-", help="Where to write, in place of stdout.")
@click.option("--stored", is_flag=True, help="Choose by the decisions that the ledger holds; nothing is scored.")
@click.option("--review", "outcome", flag_value="review", default="accepted", help="Keep what goes to review.")
@click.option("--rejected", "outcome", flag_value="rejected", help="Keep what is rejected.")
@ledger_options
@converting_options
def keep(
    files: tuple[str, ...],
    best: Best | None,
    into: str | None,
    why: str | None,
    output: str,
    stored: bool,
    outcome: str,
    settings: Settings,
    conversion: Conversion,
) -> None:
    """Write the traces in FILE that are worth keeping, each once, as JSON Lines.

    With --best these are a set: of each domain the successful traces that together are most like all of its traces, the failed
    ones among them, so that what is often asked is covered and copies are left out. It needs no model. --why says of each kept
    trace how many others it stands for, and of each other trace which kept one stands for it. With --into they are given what
    the folder has, and written to a new file in it.

    Without --best they are the traces that are accepted when they are scored offline and in order, as by `score`; their
    metadata.quality_score becomes their score.

    Lines that are invalid, and with --stored traces without a decision, are left out, named on stderr, and exit 1.
    """
    if (why or into) and not best:
        raise click.UsageError("--why and --into are for --best: of a decision, `kp-scorer explain` says why")
    if into and output != "-":
        raise click.UsageError("expected either --into or --output")
    if best and (stored or outcome != "accepted"):
        raise click.UsageError("--best chooses without decisions: expected it without --stored, --review or --rejected")
    for option, name in (("--output", output), ("--into", into or "-"), ("--why", why or "-")):
        if name != "-" and any(Path(name).resolve().is_relative_to(Path(read).resolve()) for read in files):
            raise click.BadParameter("it lies where traces are read: name a file elsewhere", param_hint=option)
    batches = ReadAhead(files, settings.limits, settings.worker.batch_size, conversion).batches()
    if best:
        _keep_best(batches, best, Path(into) if into else None, output, why, settings)
    else:
        _keep_decided(batches, files, output, stored, outcome, settings)


def _keep_best(
    batches: Iterator[Sequence[Line]], best: Best, into: Path | None, output: str, why: str | None, settings: Settings
) -> None:
    with Candidates() as candidates:
        if into:
            output = str(_new_file(into, candidates, settings))
        refused = _gather(batches, candidates, settings)
        chosen = list(choices(candidates, best))
        if why:
            with open_output(why) as write:
                for choice in chosen:
                    for verdict in choice.verdicts():
                        write(json_line(verdict.row(), allow_nan=False))
        with open_output(output) as write:
            for place in sorted(place for choice in chosen for place in choice.kept_places):
                # What no field is for may hold NaN, as it was read.
                write(json_line(candidates.read(place)[1], allow_nan=True))
        _print_summary(chosen, len(candidates))
    if refused:
        sys.exit(1)


def _new_file(into: Path, candidates: Candidates, settings: Settings) -> Path:
    """Read what was kept before from a folder, which is made if it is missing; return the name of the next file in it."""
    into.mkdir(parents=True, exist_ok=True)
    before = sorted(into.glob(_FILES))
    for file in before:
        for line in read_files([str(file)], settings.limits):
            if isinstance(line.trace, InvalidTrace):
                raise click.BadParameter(f"{file.name}, line {line.number}: {line.trace}", param_hint="--into")
            candidates.add_earlier(line.trace)
    last = int(before[-1].stem.removeprefix("kept-")) if before else 0
    return into / f"kept-{last + 1:04}.jsonl"


def _gather(batches: Iterable[Sequence[Line]], candidates: Candidates, settings: Settings) -> int:
    """Add the traces on lines of an input to the candidates; return how many lines hold none."""
    checks = Checks(settings.checks) if settings.checks.names else None
    done = refused = 0
    with progress("read") as advance:
        for batch in batches:
            for line in batch:
                if isinstance(line.trace, InvalidTrace):
                    refused += 1
                    refusal(line.number, line.trace, line.file)
                    continue
                eligible, document = line.trace.metadata.success, line.document
                if checks and eligible:
                    eligible = all(result.outcome is None for result in checks.run(line.trace))
                    document = _without_unchecked(line.trace)
                candidates.add(line.trace, document, eligible)
            done += len(batch)
            advance(done, None)
    return refused


def _print_summary(chosen: Sequence[Choice], traces: int) -> None:
    summaries = [choice.summary() for choice in chosen]
    print_summaries(summaries)
    print_note(f"kept {sum(each.kept for each in summaries)} of {traces} traces")
    if all_kept := [each.domain for each in summaries if each.kept and each.kept == each.eligible]:
        print_note(f"every success is kept, so nothing was chosen, in: {', '.join(all_kept)}")


def _without_unchecked(trace: ReasoningTrace) -> dict[str, Any]:
    """Return a trace without the fields that are ignored: no check has seen these."""
    return trace.model_dump(mode="json", exclude_unset=True)


def _keep_decided(
    batches: Iterator[Sequence[Line]], files: Sequence[str], output: str, stored: bool, outcome: str, settings: Settings
) -> None:
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
                            document = _without_unchecked(line.trace)
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
    """Look up what the ledger decided on the traces of an input, in order, or the state in which it has them."""
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
