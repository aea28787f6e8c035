"""Chooses the runs that ``kp-scorer keep`` writes, makes their rows, and writes them."""

import fcntl
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from kp_scorer.characters import escaped
from kp_scorer.checks.asking import Checks
from kp_scorer.cli.candidates import Candidates, Run, gather_earlier, gather_stored
from kp_scorer.cli.converting import CONVERTING, Conversion, Line
from kp_scorer.cli.display import BehindFailures, counted
from kp_scorer.cli.gathering import look_up_lines, score_lines, task_of
from kp_scorer.cli.input import ReadAhead
from kp_scorer.cli.keeping import Rank, choices, print_summary
from kp_scorer.cli.output import OWN_SHARE, json_line, note_count, open_output, print_note, refusal
from kp_scorer.cli.training import Against, Row, SecretsAction, Shape, TrainingFile, files_beside, row_of, rows_of_set
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, TraceConflict, TraceDead
from kp_scorer.settings import Settings
from kp_scorer.trace import ReasoningTrace

_KEPT_FILE: Final = re.compile(r"kept-([0-9]{1,18})\.jsonl(?:\.gz|\.zst)?")
_DECIDING: Final = {"routing", "gate", "review", "scoring", "novelty", "embedding", "checks"}

Best = float | int


class KeptFolder:
    """A folder with a file of traces for each run of the command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def earlier(self) -> list[Path]:
        """Return the files of earlier runs of the command, in order; they may have been compressed since."""
        return sorted(filter(_number_in, self.path.glob("kept-*.jsonl*")), key=_number_in)

    def next_file(self) -> str:
        """Return the name of the file to write next."""
        last = max(map(_number_in, self.earlier()), default=0)
        return str(self.path / f"kept-{last + 1:04}.jsonl")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder if it is missing, and let no other command add to it; raise BadParameter if one does already."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            problem = "another command adds to it" if isinstance(error, BlockingIOError) else error.strerror
            raise click.BadParameter(escaped(f"{self.path}: {problem}"), param_hint="--into") from None
        try:
            yield
        finally:
            os.close(descriptor)


def _number_in(file: Path) -> int:
    """Return the number in the name of a file, from 1; 0 if the command has not given that name."""
    match = _KEPT_FILE.fullmatch(file.name)
    return int(match[1]) if match else 0


class Request(NamedTuple):
    """The options that say what to keep, and how to write it."""

    files: Sequence[str]
    is_checked: bool  # True if checks run; they do not see ignored fields.
    best: Best | None
    rank: Rank
    most_by_task: int | None
    into: KeptFolder | None
    why: str | None
    output: str
    stored: bool
    since: datetime | None
    shape: Shape
    secrets: SecretsAction | None
    against: str | None
    licence: str | None
    outcome: str

    def check(self) -> None:
        """Raise UsageError for options that do not go together, and BadParameter for a file that would be overwritten."""
        if (self.why or self.into or self.since or self.rank == "score" or self.shape == "pairs") and not self.best:
            raise click.UsageError("--why, --into, --since, --rank and --as pairs are for --best")
        if self.most_by_task and (self.stored or not self.best):
            raise click.UsageError("--most-by-task is for --best without --stored, as Redis has no tasks")
        beside = files_beside(Path(self.output)) if self.shape in ("messages", "pairs") else ()
        written = [self.output, *map(str, beside)]
        if self.why and Path(self.why).resolve() in {Path(name).resolve() for name in written}:
            raise click.UsageError("--why and --output name one file: expected two")
        if self.into and (self.output != "-" or self.rank == "score"):
            raise click.UsageError("--into chooses by coverage, and names its files: expected no --output or --rank score")
        if self.best and self.outcome != "accepted":
            raise click.UsageError("--best chooses among all traces: expected it without --review or --rejected")
        if (self.since and not self.stored) or (self.stored and self.rank == "score"):
            raise click.UsageError("--since is for --stored, and --rank score is not")
        if self.shape != "traces" and (self.into or (self.stored and self.best)):
            raise click.UsageError("--as writes what is read from FILE: expected it without --into, and --stored --best")
        if not self.files and not (self.best and self.stored):
            raise click.UsageError("expected FILE")
        options = dict.fromkeys(written, "--output") | {self.into.path if self.into else "-": "--into", self.why: "--why"}
        places = [Path(read).resolve() for read in (*self.files, self.against) if read]
        for name, option in options.items():
            if name not in ("-", None) and any(Path(name).resolve().is_relative_to(place) for place in places):
                raise click.BadParameter("it lies where traces are read: name a file elsewhere", param_hint=option)
        if self.against is not None and not self.files:
            raise click.UsageError("--against is for FILE, as Redis has no tasks")
        if not beside and (self.licence or self.secrets not in (None, "keep")):
            raise click.UsageError("--licence, and --secrets except keep, are for --as messages or pairs")

    def described(self, settings: Settings) -> dict[str, Any]:
        """Return how the runs are chosen, for their manifest: with options as given, and settings that are not the default."""
        if self.best:
            best = f"{100 * self.best:.10g}%" if isinstance(self.best, float) else str(self.best)
            how = {"best": best, "rank": self.rank, "most_by_task": self.most_by_task}
        else:
            how = {"best": "by decision", "outcome": self.outcome, "stored": self.stored}
        params = click.get_current_context().params
        options = {name: params[name] for name in CONVERTING if params.get(name) is not None}
        sections = settings.model_dump(mode="json", include=_DECIDING, exclude_defaults=True).items()
        changed = {f"{name}.{key}": value[key] for name, value in sections for key in value}
        return {"as": self.shape, **how, **options, **changed, "against": self.against}

    def document(self, line: Line, decision: Decision | None) -> Row:
        """Return the row of a run, to be written if it is kept."""
        assert isinstance(line.trace, ReasoningTrace)
        if self.shape != "traces":
            return row_of(line, self.shape, line.trace, decision)
        is_checked = self.is_checked or (decision is not None and bool(decision.checks))
        # Leave out the ignored fields, because no check has seen them.
        document = line.trace.model_dump(mode="json", exclude_unset=True) if is_checked else dict(line.document)
        if decision:
            document["metadata"] = {**document["metadata"], "quality_score": decision.score}
        return document


class Input:
    """The traces of an input with the names of their files, and the numbers of lines without a trace or a decision."""

    def __init__(self, batches: Iterator[list[Line]], names: Sequence[str]) -> None:
        self.files: dict[str, None] = {}  # The files in which lines were read.
        self.refused = self.undecided = 0
        self._batches, self.names = batches, names

    def batches(self) -> Iterator[list[Line]]:
        """Yield batches of the lines that hold a trace, and refuse the others. The input can be read only once."""
        for batch in self._batches:
            named = [line if line.file else line._replace(file=self.names[0]) for line in batch]
            self.files |= dict.fromkeys(line.file for line in named)
            for line in named:
                if isinstance(line.trace, InvalidTrace):
                    self.refuse(line, line.trace)
            yield [line for line in named if not isinstance(line.trace, InvalidTrace)]

    def refuse(self, line: Line, error: InvalidTrace | TraceConflict | TraceDead) -> None:
        """Count a line that is left out, and print a note on it."""
        self.refused += 1
        refusal(line.number, error, line.file if line.file != self.names[0] or len(self.names) > 1 else "")


def write_kept(request: Request, conversion: Conversion, settings: Settings) -> bool:
    """Write the runs that are kept; return whether a line had no trace, or a trace no decision."""
    training = TrainingFile(request.output, request.secrets or "replace") if request.shape in ("messages", "pairs") else None
    against = None if request.against is None else Against(request.against)
    conversion.keeps_runs = request.shape != "traces"
    batches = ReadAhead(request.files, settings.limits, settings.worker.batch_size, conversion).batches()
    source = Input(against.filtered(batches) if against else batches, request.files)
    with request.into.locked() if request.into else nullcontext(), Candidates() as candidates:
        rows = _rows_chosen(request, source, candidates, settings) if request.best else _rows_decided(request, source, settings)
        if training:
            training.write(rows)
            training.describe(request.described(settings), source.files, against, request.licence)
        else:
            with open_output(request.into.next_file() if request.into else request.output) as write:
                for row in rows:
                    # Fields outside the schema are written as they were read, so they may hold NaN.
                    write(json_line(row, allow_nan=True))
    return source.refused + source.undecided > 0


def _rows_chosen(request: Request, source: Input, candidates: Candidates, settings: Settings) -> Iterator[Row]:
    """Choose a set; return the row of each run in it."""
    earlier = request.into.earlier() if request.into else []
    if request.stored:
        gather_stored(candidates, earlier, request.since, settings)
    else:
        gather_earlier(candidates, earlier, settings.limits)
        _gather(candidates, source, request, settings)
    chosen = list(choices(candidates, request.best or 0, request.rank, request.most_by_task or math.inf))
    kept_rows: dict[str, Row] = {}
    with open_output(request.why, "--why") if request.why else nullcontext(lambda _: None) as write:
        for verdict in chain.from_iterable(choice.verdicts() for choice in chosen):
            write(json_line(verdict, allow_nan=False))
            if verdict["kept"]:
                kept_rows[verdict["trace_id"]] = verdict
    print_summary(chosen, len(kept_rows), candidates)
    if request.stored and source.names:
        return _rows_in_files(kept_rows, source, settings)
    if request.stored and not request.into:
        return iter(kept_rows.values())
    places = sorted(place for choice in chosen for place in choice.kept_places)
    if request.stored:
        # Write the vectors too: a later run of this command needs them, and the log may no longer have them by then.
        return (candidates.with_vector(kept_rows[candidates.runs[place].trace_id], place) for place in places)
    return rows_of_set(request.shape, candidates, places, {name: row["stands_for"] for name, row in kept_rows.items()})


def _gather(candidates: Candidates, source: Input, request: Request, settings: Settings) -> None:
    """Add the traces of an input. For pairs, the documents of failed runs are stored, too.

    Candidates are the successes that no check keeps back, or by score all traces that no guard or check keeps back.
    """
    by_score = request.rank == "score"
    checks = Checks(settings.checks) if settings.checks.names and not by_score else None
    unscored = ((line, None) for batch in counted(source.batches(), "read") for line in batch)
    for line, result in score_lines(source.batches(), settings) if by_score else unscored:
        trace, decision = line.trace, result if isinstance(result, Decision) else None
        if isinstance(trace, InvalidTrace):
            continue
        success, domain, task = trace.metadata.success, trace.metadata.task_domain, hash(task_of(trace, line.document))
        eligible = not decision.is_guarded if decision else success
        if checks and eligible:
            eligible = all(result.outcome is None for result in checks.run(trace))
        run = Run(trace.id, domain, eligible, success, task, decision.score if decision else 0.0, line.file, line.number)
        may_be_written = eligible or (request.shape == "pairs" and not success)
        candidates.add(run, candidates.vector_of(trace), request.document(line, decision) if may_be_written else None)


def _rows_in_files(kept_rows: Mapping[str, Row], source: Input, settings: Settings) -> Iterator[Row]:
    """Yield the traces of an input that have these ids, each once; refuse those of other content than was decided."""
    missing = set(kept_rows)
    for line, result in look_up_lines(source.batches(), settings):
        if isinstance(line.trace, InvalidTrace) or line.trace.id not in missing:
            continue
        if isinstance(result, TraceConflict):
            source.refuse(line, result)
        else:
            missing.remove(line.trace.id)
            yield dict(line.document)
    note_count(len(missing), "of the kept traces are not in the files")


def _rows_decided(request: Request, source: Input, settings: Settings) -> Iterator[Row]:
    """Yield the row of each run with the requested outcome."""
    results = look_up_lines(source.batches(), settings) if request.stored else score_lines(source.batches(), settings)
    counts: Counter[str] = Counter()
    kept_ids: set[str] = set()
    behind = BehindFailures(settings)
    for line, result in results:
        if isinstance(result, Decision):
            behind.add(result)
            counts[result.outcome] += 1
            if result.outcome == request.outcome and result.trace_id not in kept_ids:
                kept_ids.add(result.trace_id)
                yield request.document(line, result)
        elif isinstance(result, str):
            counts[result] += 1
            source.undecided += 1
        else:
            source.refuse(line, result)
    counts += Counter(refused=source.refused)
    numbers = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    print_note(f"kept {len(kept_ids)} of {counts.total()}: {numbers}" if counts else f"no traces in {', '.join(source.files)}")
    behind.note()
    if request.outcome == "accepted" and counts["rejected"] > len(kept_ids) and settings.routing.gate == "score":
        print_note(OWN_SHARE)
