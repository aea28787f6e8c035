"""``kp-scorer top``: watch the workers and the queues of a fleet."""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import click
from celery import Celery
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from kp_scorer.broker.backlog import Backlog, look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.characters import escaped
from kp_scorer.cli.display import cell, console
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import duration
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.records import SubmissionCounts
from kp_scorer.store.store import Timing, WorkerReport

_EVERY_S: Final = 2.0


class Snapshot(NamedTuple):
    """The state of the fleet at the time of its backlog."""

    counts: SubmissionCounts
    backlog: Backlog
    dropped: int
    workers: Sequence[WorkerReport]


@click.command(epilog="Example: kp-scorer top --once")
@click.option("--once", is_flag=True, help="Show them once, after two seconds; the default if stderr is no terminal.")
@service_options
def top(once: bool, settings: Settings) -> None:
    """Watch all workers and queues on stderr until Ctrl-C.

    Rates, times and the forecast of when a queue of decisions will be full refer to the last seconds. The number of decisions
    of each worker counts from its start. `doctor` explains what is wrong.
    """
    out = console()
    with Store.open(settings) as store, make_celery(settings) as app:
        now = before = _snapshot(app, settings, store)
        if once or not out.is_terminal:
            time.sleep(_EVERY_S)
            out.print(_view(_snapshot(app, settings, store), before))
            return
        with suppress(KeyboardInterrupt), Live(_view(now, before), console=out, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(_EVERY_S)
                problem = ""
                try:
                    now, before = _snapshot(app, settings, store), now
                except ServiceUnavailable as error:
                    # The last snapshot stays on the screen; the next attempt follows.
                    problem = str(error)
                live.update(_view(now, before, problem), refresh=True)


def _snapshot(app: Celery, settings: Settings, store: Store) -> Snapshot:
    backlog = look_at_backlog(app, settings, store)
    dropped = sum(store.dead_letters.dropped().values())
    return Snapshot(store.ledger.counts(), backlog, dropped, store.worker_reports())


def _view(now: Snapshot, before: Snapshot, problem: str = "") -> RenderableType:
    """Return the view, with rates since ``before``; ``problem`` is the reason why there is no newer snapshot."""
    problems = [Text(escaped(problem), style="red")] if problem else []
    return Group(*problems, _table_of_totals(now, before), _table_of_workers(now, before))


def _table_of_totals(now: Snapshot, before: Snapshot) -> Table:
    table = Table.grid(padding=(0, 3))
    counts, elapsed_s = now.counts, now.backlog.at_s - before.backlog.at_s
    submitted = f"submitted {counts.submitted:,}{_rate(counts.submitted, before.counts.submitted, elapsed_s)}"
    decided = f"decided {counts.decided:,}{_rate(counts.decided, before.counts.decided, elapsed_s)}"
    pending = f"pending {counts.pending:,}, the oldest for {_seconds(now.backlog.oldest_pending_s)}"
    table.add_row(submitted, decided, pending, f"dead {counts.dead:,}", f"dropped {now.dropped:,}")
    submissions = (f"{escape(name)} {count:,}" for name, count in now.backlog.submissions.items())
    table.add_row(*submissions, *(_unread(name, now.backlog, before.backlog) for name in now.backlog.decisions))
    return table


def _unread(name: str, now: Backlog, before: Backlog) -> str:
    """Describe the unread decisions of a queue, its limits, and the time until it is full."""
    size = f", {now.used_bytes[name]:.0%} of the bytes" if name in now.used_bytes else ""
    left_s = now.full_in_s(name, before)
    is_full = name in now.full or now.used(name) >= 1
    time_left = " (full)" if is_full else f" (full in {duration(left_s)})" if math.isfinite(left_s) else ""
    return f"{escape(name)} {now.decisions[name]:,} of {now.limit:,}{size}{time_left}"


def _table_of_workers(now: Snapshot, before: Snapshot) -> Table:
    headings = ("in flight", "decided", "queued for", "in flight for", "a batch embeds", "window", "redelivered", "dead")
    figures = (Column(heading, justify="right") for heading in headings)
    table = Table(Column("worker", no_wrap=True), *figures, "ready", header_style="bold", pad_edge=False)
    earlier = {report.node: report for report in before.workers}
    for report in now.workers:
        # Compare a new worker with itself: its means are those since its start, and its rate is unknown.
        then = earlier.get(report.node, report)
        elapsed_s = now.backlog.at_s - before.backlog.at_s if report.node in earlier else 0.0
        decided = f"{_decided(report):,}{_rate(_decided(report), _decided(then), elapsed_s)}"
        means = (_mean(getattr(report, name), getattr(then, name)) for name in ("queued", "held", "embedded"))
        counts = map("{:,}".format, (report.window_entries, report.redeliveries, report.dead_letters))
        ready = cell("; ".join(report.not_ready)) or "yes"
        table.add_row(cell(report.node), f"{report.in_flight}", decided, *means, *counts, ready)
    return table


def _decided(report: WorkerReport) -> int:
    return sum(sum(counted.values()) for counted in report.decisions.values())


def _rate(count: int, then: int, elapsed_s: float) -> str:
    """Return the rate of a count; empty while it is unknown, or if the count has started anew."""
    return f" ({(count - then) / elapsed_s:,.1f}/s)" if elapsed_s > 0 and count >= then else ""


def _mean(now: Timing, then: Timing) -> str:
    """Return the mean time since the last snapshot, or since the start if nothing was done in between."""
    if now.count > then.count:
        return _seconds((now.seconds - then.seconds) / (now.count - then.count))
    return _seconds(now.seconds / now.count) if now.count else "–"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
