"""What commands print: JSON Lines for programs on stdout, progress and notes for people on stderr.

Either may be a terminal, so nothing that a trace, a file or a server said reaches them with characters that one acts on.
"""

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kp_scorer.characters import escaped, escaped_lines
from kp_scorer.cli.input import Line
from kp_scorer.client import Status
from kp_scorer.decision import Decision
from kp_scorer.errors import InvalidTrace, TraceConflict
from kp_scorer.scoring import UNKNOWN_NOVELTY

NO_EMBEDDER: Final = (
    f"there is no embedder, so every novelty is {UNKNOWN_NOVELTY:g}: "
    "install kp-scorer[embedding], and leave embedding.embedder at auto"
)
"""What whoever scores without one is told, once."""
_PLAIN_EVERY_S: Final = 2.0
_PACE_OF_S: Final = 10.0
_MARK_EVERY_S: Final = 0.5


def console() -> Console:
    """A console on stderr, wide enough for a table where there is no terminal to ask."""
    found = Console(stderr=True)
    return found if found.is_terminal else Console(stderr=True, width=160)


def say(text: str) -> None:
    """Print a note for people to stderr."""
    click.echo(escaped_lines(text), err=True)


def print_json(row: dict[str, Any]) -> None:
    """Print one JSON line and flush it, so that a reader of the pipe sees it at once.

    Raises:
        OutputFailed: stdout, as it is guarded, cannot be written; what is printed from then on goes nowhere.
    """
    # Python would also write NaN and Infinity, which are no JSON.
    print_text(escaped(json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))) + "\n")


def print_text(text: str) -> None:
    """Print a text as it is; otherwise as :func:`print_json`."""
    sys.stdout.write(text)
    sys.stdout.flush()


def refused(line: Line, error: InvalidTrace | TraceConflict) -> dict[str, Any]:
    """Say on stderr what is wrong with a line; return the same for programs."""
    say(f"line {line.number}: {error}")
    if isinstance(error, TraceConflict):
        return {"trace_id": error.trace_id, "state": "conflict", "line": line.number}
    return {"line": line.number, "state": "invalid", "problems": [problem._asdict() for problem in error.problems]}


def print_status(trace_id: str, status: Status | None) -> None:
    """Print what is known of a trace, as one JSON line."""
    row: dict[str, object] = {"trace_id": trace_id, "state": status.state if status else "unknown"}
    if status and status.decision:
        row["decision"] = status.decision.model_dump(mode="json")
    if status and status.reason:
        row |= {"reason": status.reason, "detail": status.detail}
    print_json(row)


def say_if_unmeasured(decision: Decision) -> bool:
    """Say that there is no embedder, if a decision was made without: its scores look like any others. Return whether so."""
    if is_unmeasured := decision.novelty.source == "no_embedder":
        say(NO_EMBEDDER)
    return is_unmeasured


class Advance(Protocol):
    """Moves a progress display."""

    def __call__(self, done: int, total: int | None, is_estimate: bool = False) -> None:
        """Show that ``done`` of ``total`` are finished; ``total`` is None while it is unknown."""
        ...


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """Show progress on stderr, how fast it is and what is left: a bar on a terminal, elsewhere a line every few seconds."""
    out = console()
    if not out.is_terminal:
        yield _PlainProgress(label)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task, pace = bar.add_task(label, total=None, said=""), Pace()

        def advance(done: int, total: int | None, is_estimate: bool = False) -> None:
            bar.update(task, completed=done, total=total, said=pace.said(done, total, is_estimate=is_estimate))

        yield advance


class _PlainProgress:
    def __init__(self, label: str) -> None:
        self._label = label
        self._pace = Pace()
        self._last_s = time.monotonic()
        self._is_ended = False

    def __call__(self, done: int, total: int | None, is_estimate: bool = False) -> None:
        now = time.monotonic()
        said = self._pace.said(done, total, is_estimate=is_estimate)
        was_ended, self._is_ended = self._is_ended, done == total and not is_estimate
        if (self._is_ended and not was_ended) or now - self._last_s >= _PLAIN_EVERY_S:
            self._last_s = now
            say(f"{self._label}: {said}")


class Pace:
    """How fast something goes on, and how long the rest of it takes if it goes on so."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Measure by a clock, from the first that is done on: what comes before it, loading a model, comes but once."""
        self._clock_s = clock_s
        self._marks: deque[tuple[float, int]] = deque()

    def said(self, done: int, total: int | None, *, is_estimate: bool = False) -> str:
        """Say that ``done`` of ``total`` are finished now."""
        now = self._clock_s()
        if not self._marks or now - self._marks[-1][0] >= _MARK_EVERY_S:
            self._marks.append((now, done))
        # The rate is that of the last seconds, and not of the last step.
        while len(self._marks) > 1 and now - self._marks[1][0] >= _PACE_OF_S:
            self._marks.popleft()
        then, before = self._marks[0]
        rate = (done - before) / (now - then) if now > then else 0.0
        parts = [str(done) if total is None else f"{done} of {'about ' if is_estimate else ''}{total}"]
        if rate:
            parts.append(f"{rate:,.0f} a second" if rate >= 10 else f"{rate:.1f} a second")
            if total is not None and total > done:
                parts.append(f"{_duration((total - done) / rate)} left")
        return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = math.ceil(seconds)
    minutes, hours = whole // 60, whole // 3_600
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
