"""Prints tables for people, and progress on stderr.

Import it only where it is needed, because it imports Rich, which takes time.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from kp_scorer.characters import escaped
from kp_scorer.cli.output import NO_EMBEDDER, print_json, print_note, print_row, print_text
from kp_scorer.decision import Decision, Outcome
from kp_scorer.report.phrases import CLOSE, plural, short_id, shortened, why
from kp_scorer.settings import Settings

Batch = TypeVar("Batch", bound=Sequence[object])

_NOTE_EVERY_S: Final = 2.0
_COLUMNS_WITHOUT_TERMINAL: Final = 160
_LEAST_WHY: Final = 28
_COLUMNS: Final = 80  # The width that the table needs. The objective and the reason share the rest equally.
_LEAST_TASK: Final = 20
_LONGEST_BUILT_IN: Final = 16
_COLOURS: Final[dict[Outcome, str]] = {"accepted": "green", "review": "yellow", "rejected": "red"}


def console() -> Console:
    """Return a console on stderr, which is wide enough for a table if there is no terminal."""
    terminal = Console(stderr=True)
    return terminal if terminal.is_terminal else Console(stderr=True, width=_COLUMNS_WITHOUT_TERMINAL)


def cell(text: str) -> str:
    """Escape a text from outside for the cell of a table."""
    return escape(escaped(text))


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show progress on stderr, as a bar or lines; yield a function that takes the number done and the total, if known."""
    out = console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    # By default, Rich would also redirect output that goes to a file or a pipe.
    bar = Progress(*columns, console=out, transient=True, redirect_stdout=sys.stdout.isatty(), disable=not out.is_terminal)
    task = bar.add_task(label, total=None)
    noted_s = time.monotonic()

    def advance(done: int, total: int | None) -> None:
        nonlocal noted_s
        if out.is_terminal:
            bar.update(task, completed=done, total=total)
        elif time.monotonic() - noted_s >= _NOTE_EVERY_S:
            noted_s = time.monotonic()
            print_note(f"{label}: {done}{'' if total is None else f' of {total}'}")

    with bar:
        yield advance


def counted(batches: Iterable[Batch], label: str, total: int | None = None) -> Iterator[Batch]:
    """Yield batches, and show the number of items in those that are done as progress."""
    done = 0
    with progress(label) as advance:
        for batch in batches:
            yield batch
            done += len(batch)
            advance(done, total)


def note_if_unmeasured(decision: Decision | None) -> None:
    """Print once that there is no embedder if a decision was made without one: its score looks like any other."""
    noted = click.get_current_context().meta
    if decision and decision.novelty.source == "no_embedder" and NO_EMBEDDER not in noted:
        noted[NO_EMBEDDER] = True
        print_note(NO_EMBEDDER)


def print_table(headings: Sequence[str], rows: Iterable[tuple[dict[str, Any], Sequence[str]]]) -> None:
    """Print rows: to a pipe each as a JSON line as it comes, to a terminal their cells as one table at the end."""
    first, *others = headings
    columns = (Column(heading, justify="right", no_wrap=True) for heading in others)
    table = Table(first, *columns, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for row, cells in rows:
        print_row(row, "")
        table.add_row(*cells)
    if sys.stdout.isatty():
        Console().print(table)


class BehindFailures:
    """Counts the successes that are not accepted and score less than an earlier failure that is like them."""

    def __init__(self, settings: Settings) -> None:
        self._scores: dict[str, float] = {}  # The scores of the failed runs, by trace id.
        self._count = 0
        self._is_possible = settings.novelty.against == "all" and settings.routing.gate == "score"

    def add(self, decision: Decision) -> None:
        """Count a decision. The decisions that it was compared with must be added before."""
        nearest = decision.novelty.nearest
        if self._is_possible and decision.stated and not decision.stated.success:
            self._scores[decision.trace_id] = decision.score
        elif nearest and nearest.similarity >= CLOSE and decision.outcome != "accepted":
            self._count += decision.score < self._scores.get(nearest.trace_id, 0.0)

    def note(self) -> None:
        """Print the number of these successes, and the setting that compares successes with successes alone."""
        if self._count:
            behind = plural(self._count, "success scores", "successes score")
            print_note(f"{behind} less than the failed run before that is like it: try --set novelty.against=succeeded")


class DecisionTable:
    """Prints decisions, and traces without one, as they come: to a terminal as rows of a table of 80 columns."""

    def __init__(self, *, has_tasks: bool = False) -> None:
        """With ``has_tasks``, a wider terminal also shows the beginnings of the objectives."""
        self._is_begun = False
        # Render rows to text, and print that rather than to the console's own stream: a progress bar may be drawn below.
        self._console = Console(width=None if sys.stdout.isatty() else _COLUMNS_WITHOUT_TERMINAL)
        width = (self._console.width - _COLUMNS) // 2 if has_tasks else 0
        self._task_width = width if width >= _LEAST_TASK else 0

    def print_row(self, row: dict[str, Any], decision: Decision | None, objective: str = "") -> None:
        """Print a row as JSON to a pipe; to a terminal print its decision, or its state, as a row of the table."""
        if not sys.stdout.isatty():
            print_json(row)
        elif decision:
            self.print_decision(decision, objective)
        else:
            detail = ": ".join(row[name] for name in ("reason", "detail") if name in row)
            self._print(cell(short_id(row["trace_id"])), "", "", "", cell(row["state"]), cell(detail), objective)

    def print_decision(self, decision: Decision, objective: str = "") -> None:
        """Print trace, domain, score, threshold and outcome, the reason in a few words, and the objective if there is room."""
        coloured = f"[{_COLOURS[decision.outcome]}]{decision.outcome}[/]"
        figures = (f"{decision.score:.3f}", f"{decision.threshold:.4g}")
        self._print(
            cell(short_id(decision.trace_id)), cell(decision.domain), *figures, coloured, cell(why(decision)), objective
        )

    def _print(self, *cells: str) -> None:
        *columns, objective = cells
        table = Table(box=SIMPLE_HEAD, show_header=not self._is_begun, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for heading, width in (("trace", 8), ("domain", _LONGEST_BUILT_IN), ("score", 5), ("needs", 5), ("decision", 8)):
            table.add_column(heading, justify="right" if width == 5 else "left", no_wrap=True, width=width)
        table.add_column("why", min_width=_LEAST_WHY)
        if self._task_width:
            table.add_column("task", no_wrap=True, width=self._task_width)
            columns.append(cell(shortened(objective, self._task_width)))
        table.add_row(*columns)
        self._is_begun = True
        with self._console.capture() as capture:
            self._console.print(table)
        print_text("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))
