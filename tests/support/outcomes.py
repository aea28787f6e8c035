"""What workers left: their novelty log, the audit of it, and the decisions that they published."""

from typing import Any

from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.results import open_results
from kp_scorer.decision import Outcome
from kp_scorer.novelty.audit import Report, audit
from kp_scorer.settings import Settings
from kp_scorer.store import RedisLog, Store


def only_log(store: Store) -> RedisLog:
    """The only novelty log there is."""
    (log,) = store.novelty_logs()
    return log


def audited(settings: Settings, store: Store) -> Report:
    """Audit the only log."""
    entries = list(only_log(store).entries())
    return audit(entries, store.ledger.decided, settings.novelty.window(), lambda done, total: None)


def published(settings: Settings, outcome: Outcome | None = None) -> list[dict[str, Any]]:
    """Take every decision off the results queues, or off that of one outcome."""
    taken = []
    with make_celery(settings) as app, open_results(app, settings, outcome) as results:
        for item in results.take():
            item.acknowledge()
            taken.append(item.decision)
    return taken
