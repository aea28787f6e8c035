"""``kp-scorer stats``: counts of submissions and of decisions by domain, and what the queues hold."""

from collections.abc import Mapping
from typing import Any

import click

from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.oversized import count_oversized
from kp_scorer.broker.publishing import waiting
from kp_scorer.broker.queues import shadow_queue, submission_queues
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import print_json
from kp_scorer.scoring import fingerprint
from kp_scorer.settings import Settings
from kp_scorer.store import Store


@click.command(epilog="Example: kp-scorer stats")
@service_options
def stats(settings: Settings) -> None:
    """Print one JSON line: how many submissions there were and what became of them, and what the queues hold.

    Always submitted = pending + decided + dead. A trace from another producer counts once a worker has taken it.
    Full are the results queues and streams with queues.results_limit unread decisions; dropped are decisions, by queue or
    stream, and dead letters that made room for others. On a stream is unread what some consumer group has not acknowledged.
    With Redis as the broker, oversized is how many messages too large for a worker are kept in the list traces.oversized.

    Domains counts decisions by the domain that was submitted. Unknown domains are those that no setting names, so that the
    default profile and threshold count for them: look there for misspelt ones. After 1,000 of them all others are counted
    under an empty name.

    Shadow is there if shadow.enabled is: how many decisions it was compared on, by domain, and its flips, such as
    accepted>rejected: what was accepted and the shadow would have rejected. Workers with other [scoring] or [shadow] than these
    settings have count apart, and what they came to is kept for 30 days.
    """
    policy, shadow = settings.scoring.policy(), settings.shadow.policy()
    with Store.open(settings) as store, make_celery(settings) as app:
        row: dict[str, Any] = store.ledger.counts()._asdict()
        row["dropped"] = store.drops.counts()
        counted = store.tallies.read(fingerprint(policy, shadow) if shadow else "")
        backlog = look_at_backlog(app, settings, store)
        row["waiting"] = {**backlog.submissions, **backlog.decisions}
        if settings.shadow.is_published:
            row["waiting"][settings.queues.shadow] = waiting(app, shadow_queue(settings))
        if settings.broker.is_redis:
            row["oversized"] = count_oversized(app, submission_queues(settings).traces)
    row["domains"] = {domain: count for domain, count in counted.domains.items() if policy.knows(domain)}
    row["unknown_domains"] = {domain: count for domain, count in counted.domains.items() if not policy.knows(domain)}
    if shadow:
        row["shadow"] = _compared(counted.outcomes)
    row["full"] = list(backlog.full)
    print_json(row)


def _compared(outcomes: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """On how many decisions two policies were compared, by domain, and where they differ."""
    flips = {domain: {pair: count for pair, count in found.items() if _is_flip(pair)} for domain, found in outcomes.items()}
    return {
        "decided": {domain: sum(found.values()) for domain, found in outcomes.items()},
        "flips": {domain: found for domain, found in flips.items() if found},
    }


def _is_flip(outcomes: str) -> bool:
    live, _, shadows = outcomes.partition(">")
    return live != shadows
