"""``kp-scorer report`` and ``explain``: summarise decisions as a page or as text, and explain one of them."""

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from kp_scorer.characters import escaped_lines
from kp_scorer.cli.candidates import rows_in
from kp_scorer.cli.gathering import Gathered, GatheredTrace, gather_file, gathering_options, traces_named
from kp_scorer.cli.ids import resolve_among, resolve_trace_id
from kp_scorer.cli.options import ledger_options
from kp_scorer.cli.output import open_output, print_note, print_text
from kp_scorer.coverage import Vectors
from kp_scorer.embedding.words import WordsEmbedder
from kp_scorer.endpoints import with_endpoints
from kp_scorer.novelty.verification import with_nearest
from kp_scorer.report.explanation import decided_words, flowing
from kp_scorer.report.page import check_installed, page
from kp_scorer.report.phrases import plural, shortened
from kp_scorer.report.summary import analyse
from kp_scorer.report.text import text
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.dead_letters import DeadLetter
from kp_scorer.store.records import Record
from kp_scorer.trace import ReasoningTrace

_SAMPLE: Final = 20_000  # This many decisions take 100 MB.
_FEW: Final = 5  # A file with more decisions needs --id.
_MOST_POINTS: Final = 500  # The most points of kept runs, and of dropped ones. A page with all of them takes some 2 MB.
_MOST_STEPS: Final = 12
_FILES: Final = (".json", ".jsonl", ".ndjson", ".gz", ".zst")
_REMEDIES: Final[dict[str, str]] = {
    "malformed": "Unchanged, it would fail again: have its producer send a trace.",
    "invalid": "Unchanged, it would fail again, unless limits have changed: correct and submit it; it may keep its id.",
    "conflict": "The earlier submission with this id stands: submit this one with another id.",
    "scoring_failed": "It could not be scored. Once the cause is gone, replay it.",
    "poison": "Workers died while it was in flight. Once the cause is gone, replay it.",
    "lost": "It was sent again and again, and never decided. Once the queue works, replay it.",
    "damaged": "Its record in Redis was changed: replay it. Or a later version has decided it: look at it with that version.",
}

Point = tuple[Vectors, dict[str, Any]]
"""A trace on the map of kept and dropped ones: its vector, and the texts that a click shows."""

_embedder = cache(WordsEmbedder)


@click.command(epilog="Example: kp-scorer report decisions.jsonl --output report.html")
@click.option(
    "--output",
    metavar="FILE|-",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="File for the page, or - for stdout; by default stdout if that is a file, or else report.html.",
)
@click.option("--text", "as_text", is_flag=True, help="Print text instead of writing a page.")
@click.option("--traces", metavar="FILE", type=click.Path(), help="File of traces, to show the objectives of the examples.")
@click.option(
    "--kept",
    "kept_path",
    metavar="FILE|FOLDER",
    type=click.Path(path_type=Path),
    help="What `keep` wrote of FILE, to draw a map of the kept and the dropped traces.",
)
@partial(gathering_options, sample=_SAMPLE)
def report(
    output: str | None, as_text: bool, traces: str | None, kept_path: Path | None, gathered: Gathered, settings: Settings
) -> None:
    """Summarise decisions: scores by domain, examples, reasons, repeats, and how many traces other thresholds would accept.

    FILE holds traces, which are scored, or decisions as `score` and `decisions` print them. The page is one HTML file that
    needs no network and, without --traces and --kept, holds no trace's content. It needs kp-scorer[report]; --text does not.
    """
    if not as_text:
        # Check this first, because scoring traces may take minutes.
        check_installed()
    kept_ids = set[str]()
    if kept_path:
        kept_files = sorted(kept_path.glob("*.jsonl")) if kept_path.is_dir() else [kept_path]
        kept_ids = {trace_id for trace_id, _ in rows_in(kept_files)}
    rows, points = list[GatheredTrace](), list[Point]()
    # The numbers of runs and successes by the hash of the task, and the id of its first trace.
    tasks: dict[int, tuple[int, int, str]] = {}
    for each in gathered.traces:
        if each.trace:
            runs, solved, first_id = tasks.get(hash(each.task), (0, 0, each.trace.id))
            tasks[hash(each.task)] = runs + 1, solved + each.trace.metadata.success, first_id
            if kept_path:
                points.append(_point_of(each.trace, is_kept=each.trace.id in kept_ids))
        # Drop the traces, which take more memory than their decisions.
        rows.append(each._replace(trace=None))
    if kept_path and not points:
        raise click.BadParameter("expected it beside a FILE of traces, which the map shows", param_hint="--kept")
    labels = {each.decision.trace_id: each.label for each in rows if each.label is not None}
    analysis = analyse([each.revision or each.decision for each in rows], gathered.dead_letters)
    analysis = analysis._replace(labels=labels, tasks=list(tasks.values()))
    named = traces_named(traces, list(chain(*analysis.examples.values(), *analysis.closest)), settings.limits)
    objectives = {trace_id: shortened(trace.task.objective) for trace_id, trace in named.items()}
    analysis = analysis._replace(objectives=objectives, points=[] if as_text else _map_of(points))
    if as_text:
        print_text(escaped_lines(text(analysis, gathered.source, gathered.refused)) + "\n")
    else:
        html = page(analysis, gathered.source, gathered.refused)
        with open_output(output or ("-" if stat.S_ISREG(os.fstat(1).st_mode) else "report.html")) as write:
            write(html)


def _point_of(trace: ReasoningTrace, *, is_kept: bool) -> Point:
    steps = [f"{step.type} {step.tool.name if step.tool else ''} {step.content or ''}" for step in trace.steps[:_MOST_STEPS]]
    more = [f"and {len(trace.steps) - _MOST_STEPS} more"] if len(trace.steps) > _MOST_STEPS else []
    fields = {
        "kept": is_kept,
        "outcome": "succeeded" if trace.metadata.success else "failed",
        "id": trace.id,
        "domain": trace.metadata.task_domain,
        "objective": shortened(trace.task.objective),
        "steps": [*map(shortened, steps), *more],
        "result": shortened(trace.outcome.result_summary),
    }
    embedder = _embedder()
    return embedder.embed([embedder.recipe.text(trace)])[0], fields


def _map_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return points placed along the two directions in which their vectors differ most; of many, only some, evenly chosen."""
    if not points:
        return []
    vectors = np.array([vector for vector, _ in points])
    centred = vectors - vectors.mean(axis=0)
    _, directions = np.linalg.eigh(centred.T @ centred)
    places = zip(points, (centred @ directions[:, :-3:-1]).tolist(), strict=True)
    rows = [fields | {"x": round(x, 4), "y": round(y, 4)} for (_, fields), (x, y) in places]
    # The kept ones come last, to be drawn above the others.
    groups = [[each for each in rows if each["kept"] == is_kept] for is_kept in (False, True)]
    return [each for group in groups for each in group[:: -(-len(group) // _MOST_POINTS) or 1]]


@click.command(epilog="Example: kp-scorer explain 4f1c20a9 --traces traces.jsonl")
@click.argument("subject", metavar="ID|FILE|-", type=click.Path(allow_dash=True))
@click.option(
    "--id", "chosen", metavar="ID", help="Trace in FILE to explain; the beginning of its id is enough if it is unique."
)
@click.option("--traces", metavar="FILE", type=click.Path(), help="File of traces, to quote this trace and the nearest one.")
@ledger_options
def explain(subject: str, chosen: str | None, traces: str | None, settings: Settings) -> None:
    """Explain how a decision came about, and what would have to be different for the trace to be accepted.

    ID is looked up in the ledger; kp:trace: may be left out, and the beginning of an ID is enough if it is unique. FILE
    holds traces, which are scored offline and in order, or decisions as `score` and `decisions` print them. If there is no
    decision, the command says why (the trace is pending, dead or unknown), and exits with 1, as after an invalid line in FILE.
    """
    # os.path, unlike Path, returns False where no file can have such a name. A shell may have put a pipe in place of a file.
    if subject == "-" or (os.path.exists(subject) and not os.path.isdir(subject)):  # noqa: PTH110, PTH112
        lines = _of_file(subject, chosen, traces, settings)
    elif chosen is not None:
        raise click.UsageError(f"--id chooses from a file, and there is no file {subject}")
    elif subject.endswith(_FILES):
        raise click.BadParameter(f"there is no file {subject}", param_hint="FILE")
    else:
        lines = _of_ledger(subject, traces, with_endpoints(settings))
    for line in lines:
        print_text(escaped_lines(line) + "\n")


def _of_file(name: str, chosen: str | None, traces: str | None, settings: Settings) -> Iterator[str]:
    # Without an id, score only as many traces as it takes to see that one is needed.
    file = gather_file(name, settings)
    gathered = list(islice(file.traces, None if chosen else _FEW + 1))
    decisions = {each.decision.trace_id: each.decision for each in gathered}
    if chosen is not None:
        trace_id = resolve_among(chosen, decisions)
        decisions = {trace_id: decisions[trace_id]} if trace_id in decisions else {}
    if len(decisions) > _FEW:
        raise click.UsageError(f"{name} has more than {_FEW} decisions: choose one with --id")
    if not decisions:
        print_note(f"no decisions in {name}" if chosen is None else f"{chosen}: there is no decision on such a trace in {name}")
        sys.exit(1)
    scored = {each.trace.id: each.trace for each in gathered if each.trace}
    available = scored or traces_named(traces, decisions.values(), settings.limits)
    for number, decision in enumerate(decisions.values()):
        if number:
            yield ""
        yield from decided_words(decision, available, settings.scoring)
    if file.refused:
        sys.exit(1)


def _of_ledger(id_or_beginning: str, traces: str | None, settings: Settings) -> Iterator[str]:
    """Explain a decision; without one describe the state of the trace, and exit with 1."""
    with Store.open(settings) as store:
        dead_ids = (each.trace_id for each in store.dead_letters.read() if id_or_beginning in each.trace_id)
        trace_id = resolve_trace_id(id_or_beginning, store.ledger, lambda: dead_ids)
        (record,) = store.ledger.look_up([trace_id])
        if record and record.decision:
            decision, novelty = record.decision, record.decision.novelty
            if novelty.source == "embedding" and novelty.space and not novelty.nearest:
                # Name the nearest trace if the log still shows it.
                log = store.novelty_log(novelty.space)
                window = log.info().window
                decision = with_nearest(decision, list(log.entries()), window) if window else decision
            yield from decided_words(decision, traces_named(traces, [decision], settings.limits), settings.scoring)
            if record.good is not None:
                yield from ("", f"It is labelled {'good' if record.good else 'bad'}.")
            return
        if record and record.state == "pending":
            yield from pending_words(trace_id, record)
            sys.exit(1)
        dead_letters = [each for each in store.dead_letters.read() if each.trace_id == trace_id]
    # Look at the dead letters if there is no record, because they are kept for longer.
    death = record or (dead_letters[-1] if dead_letters else None)
    if death and death.reason:
        yield from dead_words(trace_id, death.reason, death.detail, dead_letters)
    else:
        yield f"{trace_id}: unknown: never submitted, forgotten, expired, or not received by a worker yet; and no file"
    sys.exit(1)


def dead_words(trace_id: str, reason: str, detail: str, dead_letters: Sequence[DeadLetter]) -> Iterator[str]:
    """Explain why a trace is dead, and what to do; ``dead_letters`` are those of the trace, the newest last."""
    yield from flowing(f"{trace_id}: dead, {reason}: {detail}")
    yield from flowing(_REMEDIES.get(reason, ""))
    if dead_letters:
        newest = dead_letters[-1]
        by = f" by {newest.worker}, at delivery {newest.deliveries}" if newest.worker else ""
        queued = "" if newest.queued_ms is None else f", queued for {newest.queued_ms / 1_000:,.3f} s"
        yield from flowing(f"Its submission is a dead letter, last dead-lettered at {_moment(newest.last_ms)}{by}{queued}:")
        yield f"  kp-scorer dead-letter show {newest.letter_id}"
        yield f"  kp-scorer dead-letter replay {newest.letter_id}"
    if len(dead_letters) > 1:
        yield f"There are {len(dead_letters) - 1} more with its id; `kp-scorer dead-letter list` shows them."


def pending_words(trace_id: str, waiting: Record) -> Iterator[str]:
    """Yield lines on the time that a trace has been pending, and on its resends and attempts."""
    yield from flowing(f"{trace_id}: pending since {_moment(waiting.since_ms)}")
    if waiting.resends:
        yield f"It was lost on its way and sent again, {plural(waiting.resends, 'time')}."
    if waiting.attempts:
        yield f"Workers died while it was in flight, {plural(waiting.attempts, 'time')}."
    yield "`kp-scorer stats` shows how many wait on the queue."


def _moment(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
