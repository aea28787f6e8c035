"""``kp-scorer stats``, ``top`` and ``doctor``: what a fleet has done, does and has before it, and what is wrong with it."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

import click
from celery import Celery
from kombu import Exchange, Queue
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from kp_scorer.broker.backlog import Backlog, count_oversized, look_at_backlog, waiting
from kp_scorer.broker.celery_app import celery_variables, make_celery
from kp_scorer.broker.publishing import broker_shortcomings
from kp_scorer.broker.queues import results_queues, submission_queues
from kp_scorer.characters import escaped
from kp_scorer.cli.display import cell, console
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import in_words, print_row
from kp_scorer.embedding.embedder import CheckedEmbedder
from kp_scorer.embedding.select import select_embedder
from kp_scorer.errors import ModelUnconverted, NoQueue, ScorerError, ServiceUnavailable
from kp_scorer.ledger import Store
from kp_scorer.ledger.records import SubmissionCounts
from kp_scorer.ledger.store import Timing, WorkerReport
from kp_scorer.settings import Settings
from kp_scorer.settings.urls import ServerUrl, is_loopback
from kp_scorer.trace import namespace_of

_EVERY_S: Final = 2.0


@click.command(epilog="Example: kp-scorer stats")
@service_options
def stats(settings: Settings) -> None:
    """Print how many submissions there were and what became of them, and what the queues hold: one JSON line, or text.

    Always submitted = pending + decided + dead. A trace from another producer counts once a worker has received it.
    Full are results queues and streams with queues.results_limit unread decisions, for which workers wait; on a stream is
    unread what some consumer group has not acknowledged. Dropped are dead letters that made room for others, by reason. With
    Redis as the broker, oversized is how many messages too large for a worker are kept in the list traces.oversized.

    Domains counts decisions by the domain that was submitted. Unknown domains are those that no setting names, so that the
    default profile and threshold count for them: look there for misspelt ones. After 1,000 of them all others are counted
    under an empty name. Guards counts the decisions in which a guard of the section scoring fired.
    """
    policy = settings.scoring
    with Store.open(settings) as store, make_celery(settings) as app:
        row: dict[str, Any] = store.ledger.counts()._asdict()
        row["dropped"] = store.dead_letters.dropped()
        domains, row["guards"] = store.ledger.tallies()
        backlog = look_at_backlog(app, settings, store)
        row["waiting"] = {**backlog.submissions, **backlog.decisions}
        if settings.broker.is_redis:
            row["oversized"] = count_oversized(app, submission_queues(settings).traces)
    row["domains"] = {domain: count for domain, count in domains.items() if domain in policy.domains}
    row["unknown_domains"] = {domain: count for domain, count in domains.items() if domain not in policy.domains}
    row["full"] = list(backlog.full)
    print_row(row, "\n".join(f"{name.replace('_', ' ')}: {in_words(value)}" for name, value in row.items()))


class Snapshot(NamedTuple):
    """The fleet at one moment, by the monotonic clock."""

    at_s: float
    counts: SubmissionCounts
    backlog: Backlog
    dropped: int
    workers: Sequence[WorkerReport]


@click.command(epilog="Example: kp-scorer top --once")
@click.option("--once", is_flag=True, help="Show it once; so it is where stderr is no terminal, too.")
@service_options
def top(once: bool, settings: Settings) -> None:
    """Watch all workers and queues on stderr until Ctrl-C: what waits, how fast it is decided, who decides it.

    Rates and times are of the last seconds; what each worker has decided, since it started. `doctor` says what is wrong.
    """
    out = console()
    with Store.open(settings) as store, make_celery(settings) as app:
        now = before = _snapshot(app, settings, store)
        if once or not out.is_terminal:
            out.print(_view(now, before))
            return
        with suppress(KeyboardInterrupt), Live(_view(now, before), console=out, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(_EVERY_S)
                problem = ""
                try:
                    now, before = _snapshot(app, settings, store), now
                except ServiceUnavailable as error:
                    # The last snapshot stays on the screen, and it tries again.
                    problem = str(error)
                live.update(_view(now, before, problem), refresh=True)


def _snapshot(app: Celery, settings: Settings, store: Store) -> Snapshot:
    backlog = look_at_backlog(app, settings, store)
    dropped = sum(store.dead_letters.dropped().values())
    return Snapshot(time.monotonic(), store.ledger.counts(), backlog, dropped, store.worker_reports())


def _view(now: Snapshot, before: Snapshot, problem: str = "") -> RenderableType:
    """Everything, with rates since ``before``, if that is earlier; ``problem`` is why there is no newer snapshot."""
    problems = [Text(escaped(problem), style="red")] if problem else []
    return Group(*problems, _table_of_totals(now, before), _table_of_workers(now, before))


def _table_of_totals(now: Snapshot, before: Snapshot) -> Table:
    table = Table.grid(padding=(0, 3))
    counts, elapsed_s = now.counts, now.at_s - before.at_s
    submitted = f"submitted {counts.submitted:,}{_rate(counts.submitted, before.counts.submitted, elapsed_s)}"
    decided = f"decided {counts.decided:,}{_rate(counts.decided, before.counts.decided, elapsed_s)}"
    pending = f"pending {counts.pending:,}, the oldest for {_seconds(now.backlog.oldest_pending_s)}"
    table.add_row(submitted, decided, pending, f"dead {counts.dead:,}", f"dropped {now.dropped:,}")
    limit = f" of {now.backlog.limit:,}" if now.backlog.limit else ""
    submissions = (f"{escape(name)} {count:,}" for name, count in now.backlog.submissions.items())
    decisions = (f"{escape(name)} {count:,}{limit}" for name, count in now.backlog.decisions.items())
    table.add_row(*submissions, *decisions)
    return table


def _table_of_workers(now: Snapshot, before: Snapshot) -> Table:
    headings = ("in flight", "decided", "queued for", "in flight for", "a batch embeds", "window", "redelivered", "dead")
    figures = (Column(heading, justify="right") for heading in headings)
    table = Table(Column("worker", no_wrap=True), *figures, "ready", header_style="bold", pad_edge=False)
    earlier = {report.node: report for report in before.workers}
    for report in now.workers:
        # A new worker is compared with itself: its means are those since it started, and its rate is unknown.
        then = earlier.get(report.node, report)
        elapsed_s = now.at_s - before.at_s if report.node in earlier else 0.0
        decided = f"{_decided(report):,}{_rate(_decided(report), _decided(then), elapsed_s)}"
        means = (_mean(getattr(report, name), getattr(then, name)) for name in ("queued", "held", "embedded"))
        counts = map("{:,}".format, (report.window_entries, report.redeliveries, report.dead_letters))
        ready = cell("; ".join(report.not_ready)) or "yes"
        table.add_row(cell(report.node), f"{report.in_flight}", decided, *means, *counts, ready)
    return table


def _decided(report: WorkerReport) -> int:
    return sum(sum(counted.values()) for counted in report.decisions.values())


def _rate(count: int, then: int, elapsed_s: float) -> str:
    """How fast a count grows; empty while that is unknown, or if it has started again."""
    return f" ({(count - then) / elapsed_s:,.1f}/s)" if elapsed_s > 0 and count >= then else ""


def _mean(now: Timing, then: Timing) -> str:
    """The mean time since the last snapshot; since the start if that was the first, or nothing was done."""
    if now.count > then.count:
        return _seconds((now.seconds - then.seconds) / (now.count - then.count))
    return _seconds(now.seconds / now.count) if now.count else "–"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else f"{seconds:,.1f} s"


State = Literal["ok", "advice", "wrong"]
"""``wrong`` should be corrected; ``advice`` may be intended."""

_CLOCKS_MAY_DIFFER_S: Final = 2.0
_NEARLY_FULL: Final = 0.8
_ENTRIES_LOOKED_AT: Final = 1_000
_FEWEST_ENTRIES: Final = 100


class Deployment(NamedTuple):
    """What is checked."""

    settings: Settings
    store: Store
    app: Celery


Details = Iterator[tuple[State, str]]
"""What a check finds and, after a colon, what to do about it; nothing if all is in order."""


@click.command(epilog="Example: kp-scorer doctor")
@service_options
def doctor(settings: Settings) -> None:
    """Check settings, Redis, the broker, queues, workers, clocks and the embedder, and say what to do about what is wrong.

    A line a finding: ok, advice, or wrong. Exits with 0 if nothing is wrong, else 1. It changes nothing: a model
    that is not converted yet is left to the first worker.
    """
    is_wrong = False
    with Store.open(settings) as store, make_celery(settings) as app:
        for check in _CHECKS:
            name, details = check.__name__.removeprefix("_"), list[tuple[State, str]]()
            try:
                details.extend(check(Deployment(settings, store, app)))
            except ScorerError as error:
                details.append(("wrong", str(error)))
            for state, detail in details or [("ok", "in order")]:
                text = f"{name}: {'' if state == 'ok' else state + ': '}{detail}"
                print_row({"check": name, "state": state, "detail": detail}, text)
                is_wrong = is_wrong or state == "wrong"
    if is_wrong:
        sys.exit(1)


def _settings(deployment: Deployment) -> Details:
    settings = deployment.settings
    if settings.broker.is_redis and settings.ledger.resend_after_s <= settings.broker.visibility_timeout_s:
        remedy = "set ledger.resend_after_s above broker.visibility_timeout_s"
        yield "wrong", f"traces are re-sent that a dead worker still holds: {remedy}"
    if settings.worker.concurrency < 3 * settings.worker.batch_size:
        remedy = "set worker.concurrency to 3 times worker.batch_size"
        yield "advice", f"too few messages are in flight, so the engine waits: {remedy}"


def _variables(_: Deployment) -> Details:
    if names := celery_variables():
        yield "advice", f"{', '.join(names)} are set and do not count here: use KP_BROKER_URL and KP_REDIS_URL"


def _redis(deployment: Deployment) -> Details:
    yield from _exposure(deployment.settings.redis.server())
    for shortcoming in deployment.store.shortcomings():
        yield "wrong", shortcoming


def _clocks(deployment: Deployment) -> Details:
    ahead_s = deployment.store.clock_ahead_s()
    if abs(ahead_s) > _CLOCKS_MAY_DIFFER_S:
        difference = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        yield "wrong", f"Redis' clock is {difference} this machine's: have both set by NTP, or decided_at is off"


def _broker(deployment: Deployment) -> Details:
    broker = deployment.settings.broker
    if not broker.is_redis:
        yield from _exposure(broker.server())
    elif broker.url != deployment.settings.redis.url:
        yield from _exposure(broker.server())
        for shortcoming in broker_shortcomings(deployment.app):
            yield "wrong", shortcoming


def _exposure(server: ServerUrl) -> Details:
    if is_loopback(server.host.strip("[]")):
        return
    if not server.password:
        yield "wrong", f"{server.host} lets in whoever reaches it: give it users, and its protected mode back"
    if not server.is_tls:
        yield "advice", f"what goes to {server.host} can be read on its way: use TLS where the network is not yours alone"


def _queues(deployment: Deployment) -> Details:
    queues = submission_queues(deployment.settings)
    results = results_queues(deployment.settings, deployment.settings.outcomes).values()
    all_exist = True
    for queue in {queue.name: queue for queue in (*queues.in_order, queues.intake, *results) if queue}.values():
        try:
            if not deployment.settings.broker.is_redis:
                # First whether it exists: asking for its arguments would declare it.
                waiting(deployment.app, Queue(queue.name, exchange=Exchange(""), no_declare=True))
            waiting(deployment.app, queue)
        except NoQueue:
            all_exist = False
            yield "advice", f"there is no queue {queue.name} yet: start a worker, which makes it"
        except ScorerError as error:
            all_exist = False
            yield "wrong", str(error)
    if all_exist:
        # Counting what waits declares the queues that are missing.
        yield from _backlog(deployment)


def _backlog(deployment: Deployment) -> Details:
    settings = deployment.settings
    backlog = look_at_backlog(deployment.app, settings, deployment.store)
    for name, unread in backlog.decisions.items():
        count = f"{name} has {unread} unread decisions of {backlog.limit}"
        if backlog.used(name) >= _NEARLY_FULL and name in backlog.waited_for:
            yield "wrong", f"{count}: read them, as workers wait when it is full"
        elif backlog.used(name) >= _NEARLY_FULL:
            yield "advice", f"{count}, and when full takes no more: read them, or set results.rejected_via to none"
    if backlog.oldest_pending_s > settings.ledger.resend_after_s:
        waits_s = backlog.oldest_pending_s
        yield "advice", f"the oldest pending submission waits for {waits_s:.0f} s: start more workers, or see what they log"


def _workers(deployment: Deployment) -> Details:
    reports = deployment.store.worker_reports()
    if not reports:
        yield "advice", "no worker has reported for 5 s: start one with kp-scorer worker"
    for report in reports:
        for reason in report.not_ready:
            yield "wrong", f"{report.node} is not ready, {reason}: see what it logs"
    without = [report.node for report in reports if not report.embedder]
    if 0 < len(without) < len(reports):
        yield "wrong", f"{', '.join(without)} have no embedder, among others that have: install kp-scorer[embedding] there"


def _embedder(deployment: Deployment) -> Details:
    settings = deployment.settings
    try:
        embedder = select_embedder(settings.embedding, settings.novelty.recipe, converts=False)
    except ModelUnconverted:
        cost = "which takes some ten seconds and 900 MB of memory for the default one"
        yield "advice", f"the model is not converted yet for this user: the first worker converts it as it starts, {cost}"
        return
    if embedder is not None:
        CheckedEmbedder(embedder).embed([embedder.tokenize("whether it embeds at all")], alone=True)
    elif settings.embedding.embedder == "none":
        yield "advice", "there is none, as embedding.embedder says, so every novelty is 0.5: set it to auto if unintended"
    else:
        # This machine may not need one.
        have_none = any(not report.embedder for report in deployment.store.worker_reports())
        remedy = "install kp-scorer[embedding] where workers run"
        yield "wrong" if have_none else "advice", f"none can be loaded here, so every novelty is 0.5: {remedy}"


def _window(deployment: Deployment) -> Details:
    for log in deployment.store.novelty_logs():
        namespaces = Counter(map(namespace_of, log.newest(_ENTRIES_LOOKED_AT)))
        for name, count in namespaces.most_common(1):
            if len(namespaces) > 1 and namespaces.total() >= _FEWEST_ENTRIES and count > namespaces.total() / 2:
                whose = f"the namespace {name}" if name else "traces without a namespace"
                share = f"{count / namespaces.total():.0%} of the newest entries of the log {log.space}"
                yield "advice", f"{whose}: {share}, which all others are compared with: give it a fleet of its own"


_CHECKS: Final = (_settings, _variables, _redis, _clocks, _broker, _queues, _workers, _embedder, _window)
"""Each finding has the name of its function."""
