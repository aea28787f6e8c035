"""What commands print: JSON Lines for programs on stdout, progress and notes for people on stderr."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kp_scorer.cli.input import Line
from kp_scorer.client import Status
from kp_scorer.errors import InvalidTrace

_PLAIN_EVERY_S: Final = 2.0


def console() -> Console:
    """A console on stderr, wide enough for a table where there is no terminal to ask."""
    found = Console(stderr=True)
    return found if found.is_terminal else Console(stderr=True, width=160)


def say(text: str) -> None:
    """Print a note for people to stderr."""
    click.echo(text, err=True)


def print_json(row: dict[str, Any]) -> None:
    """Print one JSON line and flush it, so that a reader of the pipe sees it at once."""
    sys.stdout.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def report_invalid(line: Line, error: InvalidTrace) -> None:
    """Name an invalid line: for people on stderr, for programs on stdout."""
    say(f"line {line.number}: {error}")
    print_json({"line": line.number, "state": "invalid", "problems": [problem._asdict() for problem in error.problems]})


def print_status(status: Status) -> None:
    """Print what is known of a trace, as one JSON line."""
    row: dict[str, object] = {"trace_id": status.trace_id, "state": status.state}
    if status.decision:
        row["decision"] = status.decision.model_dump(mode="json")
    if status.reason:
        row |= {"reason": status.reason, "detail": status.detail}
    print_json(row)


class Advance(Protocol):
    """Moves a progress display."""

    def __call__(self, done: int, total: int | None) -> None:
        """Show that ``done`` of ``total`` are finished; ``total`` is None while it is unknown."""
        ...


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """Show progress on stderr: a bar on a terminal, elsewhere a line every few seconds."""
    out = console()
    if not out.is_terminal:
        yield _PlainProgress(label)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class _PlainProgress:
    def __init__(self, label: str) -> None:
        self._label = label
        self._last_s = time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        if done == total or now - self._last_s >= _PLAIN_EVERY_S:
            self._last_s = now
            say(f"{self._label}: {done} of {total}" if total else f"{self._label}: {done}")
