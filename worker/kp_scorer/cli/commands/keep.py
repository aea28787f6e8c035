"""``kp-scorer keep``: write the traces that are accepted, or the set of traces that covers all of them best."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Final, get_args

import click

from kp_scorer.cli.candidates import Candidates, gather, gather_earlier, gather_stored, without_unchecked
from kp_scorer.cli.converting import Conversion, Line, converting_options
from kp_scorer.cli.gathering import Result, score_lines
from kp_scorer.cli.input import ReadAhead
from kp_scorer.cli.keeping import Choice, Rank, Verdict, choices, print_summaries
from kp_scorer.cli.options import ledger_options, since_option
from kp_scorer.cli.output import json_line, open_output, print_note, refusal
from kp_scorer.decision import Decision
from kp_scorer.endpoints import with_endpoints
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.settings import Settings
from kp_scorer.store import Store

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
@click.argument("files", metavar="FILE|FOLDER|-...", nargs=-1, type=click.Path(allow_dash=True))
@click.option("--best", type=_best, metavar="SHARE|NUMBER", help="Keep the successes that cover all traces best: 10%, or 500.")
@click.option(
    "--rank",
    type=click.Choice(get_args(Rank)),
    default="coverage",
    help="With --best, how to choose; score keeps those of the highest scores.",
)
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    help="With --best, a folder that has what was kept before: add what adds.",
)
@click.option("--why", type=click.Path(), help="With --best, a file for a line about each trace: why it is kept or not.")
@click.option("--output", type=click.Path(allow_dash=True), default="-", help="Where to write, in place of stdout.")
@click.option("--stored", is_flag=True, help="Choose by what the fleet has decided; nothing is scored.")
@since_option
@click.option("--review", "outcome", flag_value="review", default="accepted", help="Keep what goes to review.")
@click.option("--rejected", "outcome", flag_value="rejected", help="Keep what is rejected.")
@ledger_options
@converting_options
def keep(
    files: tuple[str, ...],
    best: Best | None,
    rank: Rank,
    into: Path | None,
    why: str | None,
    output: str,
    stored: bool,
    since: datetime | None,
    outcome: str,
    settings: Settings,
    conversion: Conversion,
) -> None:
    """Write the traces in FILE that are worth keeping, each once, as JSON Lines.

    With --best these are a set: of each domain the successful traces that together are most like all of its traces, the failed
    ones among them, so that what is often asked is covered and copies are left out. It needs no model. --why says of each kept
    trace how many others it stands for, and of each other trace which kept one stands for it. With --into they are given what
    the folder has, and written to a new file in it.

    With --best and --stored they are chosen of what the fleet has decided, by the vectors in the novelty log, which holds the
    newest 11,000 by default. Redis has no texts: without FILE a line about each kept trace is written, with its id.

    Without --best they are the traces that are accepted when they are scored offline and in order, as by `score`; their
    metadata.quality_score becomes their score.

    Lines that are invalid, and with --stored traces without a decision, are left out, named on stderr, and exit 1.
    """
    if (why or into or since or rank == "score") and not best:
        raise click.UsageError("--why, --into, --since and --rank are for --best: of a decision, `kp-scorer explain` says why")
    if into and (output != "-" or rank == "score"):
        raise click.UsageError("--into adds what adds to a folder: expected it without --output and --rank score")
    if best and outcome != "accepted":
        raise click.UsageError("--best chooses among all traces: expected it without --review or --rejected")
    if (since and not stored) or (stored and rank == "score"):
        raise click.UsageError("--since is for --stored, and --rank score is not")
    if not files and not (best and stored):
        raise click.UsageError("expected FILE")
    for option, name in (("--output", output), ("--into", into or "-"), ("--why", why or "-")):
        if name != "-" and any(Path(name).resolve().is_relative_to(Path(read).resolve()) for read in files):
            raise click.BadParameter("it lies where traces are read: name a file elsewhere", param_hint=option)
    batches = ReadAhead(files, settings.limits, settings.worker.batch_size, conversion).batches()
    if not best:
        _keep_decided(batches, files, output, stored, outcome, settings)
        return
    refused = 0
    with Candidates() as candidates:
        earlier = sorted(into.glob(_FILES)) if into else []
        if stored:
            gather_stored(candidates, earlier, since, settings)
        else:
            gather_earlier(candidates, earlier, settings.limits)
            refused = gather(candidates, batches, settings, with_scores=rank == "score")
        chosen = list(choices(candidates, best, rank))
        if why:
            with open_output(why) as write:
                for verdict in _verdicts(chosen):
                    write(json_line(verdict.row(), allow_nan=False))
        with open_output(_next_file(into, earlier) if into else output) as write:
            if stored and files:
                refused = _copy({verdict.trace_id for verdict in _verdicts(chosen) if verdict.kept}, batches, write)
            elif stored:
                for verdict in filter(attrgetter("kept"), _verdicts(chosen)):
                    write(json_line(verdict.row(), allow_nan=False))
            else:
                for place in sorted(place for choice in chosen for place in choice.kept_places):
                    # Fields outside the schema may hold NaN, as they were read.
                    write(json_line(candidates.document(place), allow_nan=True))
        _print_summary(chosen, len(candidates))
    if refused:
        sys.exit(1)


def _verdicts(chosen: Iterable[Choice]) -> Iterator[Verdict]:
    return (verdict for choice in chosen for verdict in choice.verdicts())


def _copy(kept_ids: set[str], batches: Iterable[Sequence[Line]], write: Callable[[str], object]) -> int:
    """Write the traces of an input that have these ids, each once; return how many lines hold no trace."""
    refused = 0
    for line in chain.from_iterable(batches):
        if isinstance(line.trace, InvalidTrace):
            refused += 1
            refusal(line.number, line.trace, line.file)
        elif line.trace.id in kept_ids:
            kept_ids.remove(line.trace.id)
            write(json_line(line.document, allow_nan=True))
    if kept_ids:
        print_note(f"{len(kept_ids)} of the kept traces are not in the files")
    return refused


def _next_file(into: Path, earlier: Sequence[Path]) -> str:
    into.mkdir(parents=True, exist_ok=True)
    last = int(earlier[-1].stem.removeprefix("kept-")) if earlier else 0
    return str(into / f"kept-{last + 1:04}.jsonl")


def _print_summary(chosen: Sequence[Choice], traces: int) -> None:
    summaries = [choice.summary() for choice in chosen]
    print_summaries(summaries)
    print_note(f"kept {sum(each.kept for each in summaries)} of {traces} traces")
    if roomy := [each.domain for each, choice in zip(summaries, chosen, strict=True) if each.eligible and choice.had_room]:
        print_note(f"nothing was chosen, as there was room for every success, and only copies are left out: {', '.join(roomy)}")


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
                            document = without_unchecked(line.trace)
                        scored = {**document, "metadata": {**document["metadata"], "quality_score": result.score}}
                        # Fields outside the schema may hold NaN, as they were read.
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
    """Look up the decisions on the traces of an input, in order, or the states of those without one."""
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
