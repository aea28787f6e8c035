"""Tables and progress for people, on stderr. What imports this imports Rich."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn

from kp_scorer.characters import escaped
from kp_scorer.cli.output import print_note
from kp_scorer.decision import Override
from kp_scorer.trace import TRACE_ID_PREFIX

OVERRIDE_WORDS: Final[dict[Override, str]] = {
    "single_thought": "a single thought (score 0.1)",
    "recovered_from_errors": "recovered from errors (+0.1)",
    "single_tool": "only one tool (-0.1)",
}
_NOTE_EVERY_S: Final = 2.0
_RATE_OF_S: Final = 10.0


def console() -> Console:
    """A console on stderr, wide enough for a table where there is no terminal to ask."""
    terminal = Console(stderr=True)
    return terminal if terminal.is_terminal else Console(stderr=True, width=160)


def cell(text: str) -> str:
    """A text from outside as the cell of a table."""
    return escape(escaped(text))


def percent(share: float) -> str:
    """A share, 0..1, to a tenth of a percent."""
    return f"{100 * share:.1f}%"


def short_id(trace_id: str) -> str:
    """The first part of a trace id, enough to distinguish the traces of a table."""
    return trace_id.removeprefix(TRACE_ID_PREFIX)[:8]


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show progress on stderr, its rate and the time left: a bar on a terminal, elsewhere a line every few seconds.

    Yields a function of how many are done, and of how many there are in all, None while that is unknown.
    """
    out = console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[pace]}"), TimeElapsedColumn())
    bar = Progress(*columns, console=out, transient=True, speed_estimate_period=_RATE_OF_S)
    bar.add_task(label, total=None, pace="")
    (task,) = bar.tasks
    noted_s = time.monotonic()

    def advance(done: int, total: int | None) -> None:
        nonlocal noted_s
        was_complete = task.completed == task.total
        # Rich 15.0's update() would forget the rate whenever the total, which may be an estimate, changes.
        task.total = total
        bar.update(task.id, completed=done)
        task.fields["pace"] = pace(task)
        is_due = (done == total and not was_complete) or time.monotonic() - noted_s >= _NOTE_EVERY_S
        if is_due and not out.is_terminal:
            noted_s = time.monotonic()
            print_note(f"{label}: {task.fields['pace']}")

    with bar if out.is_terminal else nullcontext():
        yield advance


def pace(task: Task) -> str:
    """How far a task is, how fast it proceeds, and how long the rest of it takes at this rate."""
    parts = [f"{task.completed:.0f}" if task.total is None else f"{task.completed:.0f} of {task.total:.0f}"]
    if rate := task.speed:
        parts.append(f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.1f} a second")
        if task.total is not None and task.total > task.completed:
            parts.append(f"{timedelta(seconds=math.ceil((task.total - task.completed) / rate))} left")
    return ", ".join(parts)
