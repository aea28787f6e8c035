"""What `kp-scorer top` shows: all workers of a fleet, what they do, and what waits for them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kp_scorer.broker.backlog import Backlog
from kp_scorer.characters import escaped
from kp_scorer.decision import Outcome
from kp_scorer.store import Counts, Timed, WorkerReport
from kp_scorer.store.suitability import nearly_full

_UNKNOWN: Final = "–"


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment, by the monotonic clock."""

    at_s: float
    counts: Counts
    backlog: Backlog
    dropped: int
    workers: Sequence[WorkerReport]


def view(now: Look, before: Look | None, problem: str = "") -> RenderableType:
    """Everything, with rates since ``before``, or without any; ``problem`` is what keeps one from looking again."""
    return Group(
        *(Text(escaped(problem), style="red") for _ in range(bool(problem))),
        _totals(now, before),
        *(Text(warning, style="yellow") for warning in _warnings(now)),
        _decisions(now.workers),
        _workers(now, before),
    )


def _totals(now: Look, before: Look | None) -> Table:
    table = Table.grid(padding=(0, 3))
    counts, then = now.counts, before.counts if before else None
    table.add_row(
        f"submitted {counts.submitted:,}{_rate(now, before, counts.submitted, then and then.submitted)}",
        f"decided {counts.decided:,}{_rate(now, before, counts.decided, then and then.decided)}",
        f"pending {counts.pending:,}, the oldest for {_seconds(now.backlog.oldest_pending_s)}",
        f"dead {counts.dead:,}",
        f"dropped {now.dropped:,}",
    )
    waiting = {**now.backlog.submissions, **now.backlog.decisions}
    table.add_row(*(f"{escape(name)} {count:,}" for name, count in waiting.items()))
    return table


def _warnings(now: Look) -> Iterator[str]:
    """What an operator should do something about."""
    if not now.workers:
        yield "no worker has said anything for 5 s: none runs"
    for name in now.backlog.full:
        yield f"{name} is full of unread decisions: read them, or raise queues.results_limit"
    if said := nearly_full(now.backlog.redis_used or 0.0):
        yield f"Redis: {said}"
    degraded = [report for report in now.workers if not report.embedder]
    if degraded:
        nodes = ", ".join(escaped(report.node) for report in degraded)
        yield f"without embedder, so that every novelty is 0.5: {nodes}"


def _decisions(workers: Sequence[WorkerReport]) -> Table:
    """How many decisions the workers that run have made, by domain and outcome."""
    outcomes = get_args(Outcome)
    by_domain: dict[str, Counter[str]] = {}
    for report in workers:
        for outcome, counted in report.decisions.items():
            for domain, count in counted.items():
                by_domain.setdefault(domain, Counter())[outcome] += count
    table = Table(header_style="bold", pad_edge=False)
    table.add_column("domain")
    for heading in (*outcomes, "accepted of all"):
        table.add_column(heading, justify="right")
    for domain, found in sorted(by_domain.items()):
        share = found["accepted"] / found.total()
        table.add_row(escape(escaped(domain)), *(f"{found[outcome]:,}" for outcome in outcomes), f"{share:.0%}")
    return table


def _workers(now: Look, before: Look | None) -> Table:
    table = Table(header_style="bold", pad_edge=False)
    table.add_column("worker", no_wrap=True)
    for heading in ("in hand", "decided", "queued for", "in hand for", "a batch embeds", "window", "came again", "dead"):
        table.add_column(heading, justify="right")
    table.add_column("takes work")
    earlier = {report.node: report for report in before.workers} if before else {}
    for report in now.workers:
        then = earlier.get(report.node)
        decided, decided_then = (_decided(each) if each else None for each in (report, then))
        table.add_row(
            escape(escaped(report.node)),
            f"{report.in_hand}",
            f"{decided or 0:,}{_rate(now, before, decided or 0, decided_then)}",
            _mean(report.queued, then.queued if then else None),
            _mean(report.held, then.held if then else None),
            _mean(report.embedded, then.embedded if then else None),
            f"{report.window_entries:,}",
            f"{report.redeliveries:,}",
            f"{report.dead_letters:,}",
            escape(escaped("; ".join(report.not_ready))) or "yes",
        )
    return table


def _decided(report: WorkerReport) -> int:
    return sum(sum(counted.values()) for counted in report.decisions.values())


def _rate(now: Look, before: Look | None, count: int, then: int | None) -> str:
    """How fast a count grows; empty while that is not known, or if it has begun anew."""
    if before is None or then is None or now.at_s <= before.at_s or count < then:
        return ""
    return f" ({(count - then) / (now.at_s - before.at_s):,.1f}/s)"


def _mean(now: Timed, then: Timed | None) -> str:
    """How long it took since the last look, one with the other; since the start if that was the first, or nothing was done."""
    if then is not None and now.count > then.count:
        return _seconds((now.seconds - then.seconds) / (now.count - then.count))
    return _seconds(now.seconds / now.count) if now.count else _UNKNOWN


def _seconds(seconds: float) -> str:
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"
