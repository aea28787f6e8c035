"""``kp-scorer stats``: count submissions, decisions, what waits, and what workers do."""

from typing import Any

import click

from kp_scorer.broker.backlog import count_oversized, look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import in_words, print_note, print_row
from kp_scorer.report.phrases import plural
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.store.store import WorkerReport


@click.command(epilog="Example: kp-scorer stats")
@service_options
def stats(settings: Settings) -> None:
    """Print figures on submissions and their outcomes, on the queues and on each worker, as one JSON line or as text.

    At any time, submitted = pending + decided + dead; a note on stderr says if this fails, or if a Redis has evicted keys.
    Other losses do not show, such as those of a Redis that came back from an older snapshot. A trace from another producer
    counts once a worker has received it. `full` lists the results queues and streams that accept no more decisions, so that
    workers wait; on a stream, a decision is unread until every consumer group has acknowledged it. `dropped` counts by reason
    the dead letters that made room for others. With Redis as the broker, `oversized` counts messages too large for a worker,
    which are kept in the list traces.oversized or that of another queue. `bytes` estimates from a sample what the memory of
    each Redis holds: records, the novelty log with all that traces are compared with, the queue of traces, unread decisions,
    dead letters, runs that are being collected, and the rest.

    `domains` counts decisions by their submitted domain. `unknown_domains` are those that no setting names, so that the default
    profile and threshold apply: look there for misspelt ones. After 1,000 of them, all others are counted under an empty name.
    `guards` counts the decisions in which a guard of the section scoring fired, `revised` the revisions by late outcomes, by
    their outcome. Late outcomes are submissions, too.

    `workers` are those that are alive, each with what it has done since its start, and with the mean seconds that messages were
    queued and in flight, and that a pass through the engine took. `doctor` explains what is wrong.
    """
    named = settings.scoring.domains
    with Store.open(settings) as store, make_celery(settings) as app:
        row: dict[str, Any] = store.ledger.counts()._asdict()
        row["dropped"] = store.dead_letters.dropped()
        domains, row["guards"], row["revised"] = store.ledger.tallies()
        reports = store.worker_reports()
        backlog = look_at_backlog(app, settings, store, reports)
        row["waiting"] = {**backlog.submissions, **backlog.unread.counts}
        if settings.broker.is_redis:
            row["oversized"] = sum(count_oversized(app, settings.queues.traces).values())
        row["bytes"] = backlog.used_by_part
        row["workers"] = list(map(_described, reports))
    row["domains"] = {domain: count for domain, count in domains.items() if domain in named}
    row["unknown_domains"] = {domain: count for domain, count in domains.items() if domain not in named}
    row["full"] = list(backlog.unread.full)
    counted = row["pending"] + row["decided"] + row["dead"]
    if row["submitted"] != counted:
        print_note(f"the ledger has lost records: submitted {row['submitted']} is not pending + decided + dead, {counted}")
    for server, condition in backlog.servers.items():
        if condition.evicted_keys:
            evicted = plural(condition.evicted_keys, "key")
            print_note(f"{server} has evicted {evicted} since it started, which may be records")
    print_row(row, "\n".join(f"{name.replace('_', ' ')}: {in_words(value)}" for name, value in row.items()))


def _described(report: WorkerReport) -> dict[str, Any]:
    counts = report.model_dump(include={"in_flight", "redeliveries", "dead_letters", "window_entries"})
    decided = sum(sum(by_domain.values()) for by_domain in report.decisions.values())
    timings = {"queued_s": report.queued, "in_flight_s": report.held, "pass_s": report.embedded}
    means = {name: round(timing.seconds / timing.count, 3) for name, timing in timings.items() if timing.count}
    return {"worker": report.node, "not_ready": list(report.not_ready), "decided": decided, **counts, **means}
