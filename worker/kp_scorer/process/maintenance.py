"""The periodic tasks of a worker beside the road of messages: they serve the ledger, the queues, its memory and its metrics."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from celery import Celery

from kp_scorer.broker.dead_queue import QueueDrainer, drain_all
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.process.memory import collect_garbage
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.submission_resender import resend_lost
from kp_scorer.process.watchdog import PeriodicTasks
from kp_scorer.settings import Settings
from kp_scorer.store import Store

_RESEND_EVERY_S: Final = 10.0
_DRAIN_DEAD_EVERY_S: Final = 2.0
_DRAIN_INTAKE_EVERY_S: Final = 0.2
_LOOK_EVERY_S: Final = 10.0
_COLLECT_EVERY_S: Final = 5.0


def start_maintenance(
    tasks: PeriodicTasks,
    app: Celery,
    queues: Sequence[SubmissionQueues],
    settings: Settings,
    store: Store,
    metrics: Metrics,
    look_at_backlog: Callable[[], None],
) -> None:
    """Start the tasks, and make metrics show the time since the last successful call of each."""
    every_s = min(_RESEND_EVERY_S, settings.ledger.resend_after_s / 4)
    tasks.start("submission_resender", partial(resend_lost, app, queues, store, settings.ledger, metrics, {}), every_s)
    tasks.start("dead_letter_dropper", store.dead_letters.make_room, every_s)
    tasks.start("garbage_collector", collect_garbage, _COLLECT_EVERY_S)
    if dead := [QueueDrainer(app, each.dead, each, store) for each in queues if each.dead]:
        tasks.start("dead_queue_drainer", partial(drain_all, dead), _DRAIN_DEAD_EVERY_S)
    if intakes := [QueueDrainer(app, each.intake, each, store) for each in queues if each.intake]:
        tasks.start("intake_drainer", partial(drain_all, intakes), _DRAIN_INTAKE_EVERY_S)
    watcher = tasks.start("backlog_watcher", look_at_backlog, _LOOK_EVERY_S)
    metrics.backlog_age_s.set_function(watcher.stall.elapsed_s)
    for task in tasks.threads:
        metrics.work_age_s.labels(task.name).set_function(task.stall.elapsed_s)
