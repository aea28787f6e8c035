"""What `kp-scorer doctor` looks at, one thing a function: each gives what it found, with what to do about it."""

from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple

from celery import Celery
from kombu import Exchange, Queue

from kp_scorer.broker.backlog import look_at_backlog
from kp_scorer.broker.celery_app import celery_variables
from kp_scorer.broker.publishing import NoQueue, broker_shortcomings, waiting
from kp_scorer.broker.queues import results_queues, submission_queues
from kp_scorer.embedding import CheckedEmbedder, select_embedder
from kp_scorer.errors import ModelUnconverted, ScorerError
from kp_scorer.settings import Settings
from kp_scorer.store import Store
from kp_scorer.urls import ServerUrl

State = Literal["ok", "advice", "wrong"]

_CLOCKS_MAY_DIFFER_S: Final = 2.0
_NEARLY_FULL: Final = 0.8
_LOCAL: Final = ("", "localhost", "127.0.0.1", "::1")


class Finding(NamedTuple):
    """What was found."""

    check: str
    state: State
    """``wrong`` is what should be put right; ``advice`` what may be meant so."""
    detail: str
    """How it is and, after a colon, what to do about it."""


class Patient(NamedTuple):
    """What is looked at."""

    settings: Settings
    store: Store
    app: Celery


def diagnose(patient: Patient) -> Iterator[Finding]:
    """Look at everything, and give what was found as soon as it is; of what is in order, that it is."""
    for name, look in _CHECKS.items():
        found = False
        try:
            for state, detail in look(patient):
                found = True
                yield Finding(name, state, detail)
        except ScorerError as error:
            found = True
            yield Finding(name, "wrong", str(error))
        if not found:
            yield Finding(name, "ok", "in order")


Found = Iterator[tuple[State, str]]


def _settings(patient: Patient) -> Found:
    settings = patient.settings
    if settings.broker.is_redis and settings.ledger.resend_after_s <= settings.broker.visibility_timeout_s:
        yield (
            "wrong",
            "traces are sent again that a dead worker still holds: set ledger.resend_after_s above broker.visibility_timeout_s",
        )
    if settings.worker.concurrency < 3 * settings.worker.batch_size:
        yield (
            "advice",
            "fewer than three batches are in hand, so the engine waits: set worker.concurrency to 3 times worker.batch_size",
        )


def _variables(_: Patient) -> Found:
    if names := celery_variables():
        yield "advice", f"{', '.join(names)} are set and do not count here: use KP_BROKER_URL and KP_REDIS_URL"


def _redis(patient: Patient) -> Found:
    yield from _exposure(patient.settings.redis.server())
    for shortcoming in patient.store.shortcomings():
        yield "wrong", shortcoming


def _clocks(patient: Patient) -> Found:
    ahead_s = patient.store.clock_ahead_s()
    if abs(ahead_s) > _CLOCKS_MAY_DIFFER_S:
        which = "ahead of" if ahead_s > 0 else "behind"
        yield (
            "wrong",
            f"Redis' clock is {abs(ahead_s):.0f} s {which} this machine's: have both set by NTP, or decided_at is off",
        )


def _broker(patient: Patient) -> Found:
    broker = patient.settings.broker
    if not broker.is_redis:
        yield from _exposure(broker.server())
    elif broker.url != patient.settings.redis.url:
        yield from _exposure(broker.server())
        for shortcoming in broker_shortcomings(patient.app):
            yield "wrong", shortcoming


def _exposure(server: ServerUrl) -> Found:
    if server.host.strip("[]") in _LOCAL or server.scheme == "unix":
        return
    if not server.password:
        yield "wrong", f"{server.host} lets in whoever reaches it: give it users, and its protected mode back"
    if not server.is_tls:
        yield "advice", f"what goes to {server.host} can be read on its way: use TLS where the network is not yours alone"


def _queues(patient: Patient) -> Found:
    queues = submission_queues(patient.settings)
    ours = [
        *queues.in_order,
        *filter(None, [queues.intake]),
        *results_queues(patient.settings, patient.settings.outcomes).values(),
    ]
    is_whole = True
    for queue in {queue.name: queue for queue in ours}.values():
        try:
            if not patient.settings.broker.is_redis:
                # First whether it is there, as to ask for its arguments would make it.
                waiting(patient.app, Queue(queue.name, exchange=Exchange(""), no_declare=True))
            waiting(patient.app, queue)
        except NoQueue:
            is_whole = False
            yield "advice", f"there is no queue {queue.name} yet: start a worker, which makes it"
        except ScorerError as error:
            is_whole = False
            yield "wrong", str(error)
    if is_whole:
        # To count what waits makes the queues that are missing.
        yield from _backlog(patient)


def _backlog(patient: Patient) -> Found:
    settings = patient.settings
    limit = settings.queues.results_limit
    backlog = look_at_backlog(patient.app, settings, patient.store)
    for name, unread in backlog.decisions.items():
        if name in backlog.full:
            yield "wrong", f"{name} is full, with {unread} unread decisions: read them, as workers wait until some are"
        elif limit and unread >= _NEARLY_FULL * limit:
            yield "wrong", f"{name} has {unread} unread decisions of {limit}: read them, or workers will wait"
    if backlog.oldest_pending_s > settings.ledger.resend_after_s:
        waits_s = backlog.oldest_pending_s
        yield "advice", f"the oldest pending submission waits for {waits_s:.0f} s: start more workers, or see what they log"


def _workers(patient: Patient) -> Found:
    reports = patient.store.workers.reports()
    if not reports:
        yield "advice", "no worker has said anything for 5 s: start one with kp-scorer worker"
    for report in reports:
        for reason in report.not_ready:
            yield "wrong", f"{report.node} takes no work, {reason}: see what it logs"
    without = [report.node for report in reports if not report.embedder]
    if without and len(without) < len(reports):
        yield "wrong", f"{', '.join(without)} have no embedder, among others that have: install kp-scorer[embedding] there"


def _embedder(patient: Patient) -> Found:
    settings = patient.settings
    try:
        embedder = select_embedder(settings.embedding, settings.novelty.recipe, converts=False)
    except ModelUnconverted:
        yield (
            "advice",
            "the model is not converted yet for whoever runs this here: the first worker converts it as it starts, "
            "which takes some ten seconds and 900 MB of memory for the default one",
        )
        return
    if embedder is not None:
        CheckedEmbedder(embedder).embed(["whether it embeds at all"])
    elif settings.embedding.embedder == "none":
        yield (
            "advice",
            "there is none, as embedding.embedder says, so every novelty is 0.5: set it to auto if that is not meant",
        )
    else:
        # Whoever looks may have no use for one.
        have_none = any(not report.embedder for report in patient.store.workers.reports())
        yield (
            "wrong" if have_none else "advice",
            "none can be loaded here, and without one every novelty is 0.5: install kp-scorer[embedding] where workers run",
        )


_CHECKS: Final[dict[str, Callable[[Patient], Found]]] = {
    "settings": _settings,
    "variables": _variables,
    "redis": _redis,
    "clocks": _clocks,
    "broker": _broker,
    "queues": _queues,
    "workers": _workers,
    "embedder": _embedder,
}
