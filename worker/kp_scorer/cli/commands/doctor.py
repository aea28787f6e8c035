"""``kp-scorer doctor``: find the faults of a deployment, and say how to mend them."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Final, Literal

import click
from celery import Celery
from kombu import Exchange, Queue

from kp_scorer.broker.backlog import lists_beside, unread_decisions
from kp_scorer.broker.calls import broker_condition, check_publishing, waiting
from kp_scorer.broker.celery_app import celery_variables, make_celery
from kp_scorer.broker.queues import results_queues, submission_queues
from kp_scorer.cli.options import service_options
from kp_scorer.cli.output import duration, print_row
from kp_scorer.embedding.embedder import CheckedEmbedder
from kp_scorer.embedding.select import select_embedder
from kp_scorer.errors import NoQueue, ScorerError
from kp_scorer.novelty_meter import UNREADABLE
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import EmbeddingSettings, LedgerSettings, RecipeName
from kp_scorer.settings.server_sections import BrokerSettings, RedisSettings
from kp_scorer.settings.urls import ServerUrl, is_loopback
from kp_scorer.store import Store
from kp_scorer.trace import namespace_of

_NEARLY_FULL: Final = 0.8
_SOON_S: Final = 3_600.0
_LOOKS_APART_S: Final = 2.0  # The time between two looks, which show how fast a queue grows.
_ENTRIES_LOOKED_AT: Final = 1_000
_FEWEST_ENTRIES: Final = 100

Findings = Iterator[tuple[Literal["ok", "advice", "wrong"], str]]
"""The findings of a check, each with its remedy after a colon. ``wrong`` should be corrected, ``advice`` may be intended."""


@click.command(epilog="Example: kp-scorer doctor")
@service_options
def doctor(settings: Settings) -> bool:
    """Check settings, Redis and its clock, the broker, queues, workers and the embedder, and print how to mend what is wrong.

    Prints a line for each finding: ok, advice, or wrong. Exits with 0 if nothing is wrong, else 1. It changes nothing.
    """
    is_wrong = False
    with Store.open(settings) as store, make_celery(settings) as app:
        checks: dict[str, Findings] = {
            "settings": _settings(settings.broker, settings.ledger),
            "variables": _variables(),
            "redis": _redis(settings.redis, store),
            "broker": _broker(settings.broker, settings.redis, app),
            "queues": _queues(settings, store, app),
            "workers": _workers(store),
            "embedder": _embedder(settings.embedding, settings.novelty.recipe, store),
            "window": _window(store),
        }
        for name, findings in checks.items():
            rows: list[tuple[str, str]] = []
            try:
                rows.extend(findings)
            except ScorerError as error:
                rows.append(("wrong", str(error)))
            for state, detail in rows or [("ok", "in order")]:
                text = f"{name}: {'' if state == 'ok' else state + ': '}{detail}"
                print_row({"check": name, "state": state, "detail": detail}, text)
                is_wrong = is_wrong or state == "wrong"
    return is_wrong


def _settings(broker: BrokerSettings, ledger: LedgerSettings) -> Findings:
    if broker.is_redis and ledger.resend_after_s <= broker.visibility_timeout_s:
        remedy = "set ledger.resend_after_s above broker.visibility_timeout_s"
        yield "wrong", f"traces that a dead worker still holds are sent again: {remedy}"


def _variables() -> Findings:
    if names := celery_variables():
        yield "advice", f"{', '.join(names)} are set and do not count here: use KP_BROKER_URL and KP_REDIS_URL"


def _redis(redis: RedisSettings, store: Store) -> Findings:
    yield from _exposure(redis.server())
    for shortcoming in store.condition().shortcomings:
        yield "wrong", shortcoming


def _broker(broker: BrokerSettings, redis: RedisSettings, app: Celery) -> Findings:
    if broker.url != redis.url:
        yield from _exposure(broker.server())
        for shortcoming in broker_condition(app).shortcomings if broker.is_redis else ():
            yield "wrong", shortcoming
    if not broker.is_redis:
        check_publishing(app)


def _exposure(server: ServerUrl) -> Findings:
    if is_loopback(server.host.strip("[]")):
        return
    if not server.password:
        yield "wrong", f"{server.host} lets in anyone who reaches it: give it users, and turn its protected mode on again"
    if not server.is_tls:
        yield "advice", f"traffic to {server.host} can be read on its way: use TLS unless the network is yours alone"


def _queues(settings: Settings, store: Store, app: Celery) -> Findings:
    queues = submission_queues(settings.broker, settings.queues).values()
    submissions = (queue for each in queues for queue in (*each.in_order, each.intake))
    results = results_queues(settings, settings.kinds).values()
    all_exist = True
    for queue in {queue.name: queue for queue in (*submissions, *results) if queue}.values():
        try:
            if not settings.broker.is_redis:
                # First check that the queue exists: comparing its arguments, which comes next, would declare a missing one.
                waiting(app, Queue(queue.name, exchange=Exchange(""), no_declare=True))
            waiting(app, queue)
        except NoQueue as error:
            all_exist = False
            if queue.no_declare:
                yield "wrong", str(error)
            else:
                yield "advice", f"there is no queue {queue.name} yet: start a worker, which makes it"
        except ScorerError as error:
            all_exist = False
            yield "wrong", str(error)
    if all_exist and settings.broker.is_redis:
        own = settings.queues.traces
        for name in sorted({name for each in queues for name in lists_beside(app, each.traces)} - {*own}):
            # A list with another beginning may be the queue of another fleet.
            state: Literal["wrong", "advice"] = "wrong" if name.startswith(tuple(own)) else "advice"
            remedy = "set neither priority_steps, sep nor global_keyprefix where you submit"
            yield state, f"{name!r} has messages that none of these workers receives: {remedy}"
    if all_exist:
        # This comes last, because counting declares missing queues.
        yield from _backlog(settings, store, app)


def _backlog(settings: Settings, store: Store, app: Celery) -> Findings:
    unread = before = unread_decisions(app, settings, store, store.worker_reports())
    if any(map(before.used, before.counts)):
        time.sleep(_LOOKS_APART_S)
        unread = unread_decisions(app, settings, store, store.worker_reports())
    for name, number in unread.counts.items():
        is_nearly_full = name in unread.full or unread.used(name) >= _NEARLY_FULL
        left_s = unread.full_in_s(name, before)
        if not is_nearly_full and left_s > _SOON_S:
            continue
        used_bytes = unread.used_bytes(name)
        size = "" if used_bytes is None else f", {used_bytes:.0%} of its bytes"
        if name in unread.full and unread.used(name) < 1:
            size = ", and has no room for more bytes"
        time_left = f", full in {duration(left_s)}" if math.isfinite(left_s) else ""
        count = f"{name} has {number} unread decisions of {unread.limit}{size}{time_left}"
        if name in unread.rings:
            yield "advice", f"{count}, and when full drops the oldest: read them, or take rejected out of results.publish"
        else:
            yield "wrong" if is_nearly_full else "advice", f"{count}: read them, as workers wait when it is full"
    if (waits_s := store.ledger.oldest_pending_s()) > settings.ledger.resend_after_s:
        yield "advice", f"the oldest pending submission waits for {waits_s:.0f} s: start more workers, or see what they log"


def _workers(store: Store) -> Findings:
    reports = store.worker_reports()
    if not reports:
        yield "advice", "no worker has reported for 5 s: start one with kp-scorer worker"
    for report in reports:
        for reason in report.not_ready:
            yield "wrong", f"{report.node} is not ready, {reason}: see what it logs"
        for work, error in report.failing.items():
            yield "wrong", f"{report.node} decides traces, but its {work} fails: {error}"
    without = [report.node for report in reports if not report.embedder]
    if 0 < len(without) < len(reports):
        yield "wrong", f"{', '.join(without)} have no embedder, among others that have: install kp-scorer[embedding] there"
    for name, of in (("settings", attrgetter("settings")), ("spaces of vectors", attrgetter("space"))):
        # A worker that has only just started reports neither settings nor a space.
        if len({of(report) for report in reports} - {""}) > 1:
            named = ", ".join(f"{report.node} {of(report)}" for report in reports)
            yield "wrong", f"workers have different {name}, {named}: unless you are replacing them, give all the same"


def _embedder(embedding: EmbeddingSettings, recipe: RecipeName, store: Store) -> Findings:
    embedder = select_embedder(embedding, recipe)
    if embedder is not None:
        CheckedEmbedder(embedder).embed(embedder.tokenize_all(["whether it embeds at all"]), alone=True)
    elif embedding.embedder == "none":
        yield "advice", "there is none, as embedding.embedder says, so every novelty is 0.5: set it to auto if unintended"
    else:
        # It is wrong only if a worker has none either, because this machine may not need an embedder.
        have_none = any(not report.embedder for report in store.worker_reports())
        remedy = "install kp-scorer[embedding] where workers run"
        yield "wrong" if have_none else "advice", f"none can be loaded here, so every novelty is 0.5: {remedy}"


def _window(store: Store) -> Findings:
    for log in store.novelty_logs():
        newest = [entry.trace_id for entry in log.newest(_ENTRIES_LOOKED_AT)]
        decided = [each.decision.novelty for each in store.ledger.decided(newest[:_FEWEST_ENTRIES]) if each]
        if unreadable := sum(novelty.is_unreadable for novelty in decided):
            yield "advice", f"{unreadable} of the newest {len(decided)} traces of the log {log.space}: {UNREADABLE}"
        namespaces = Counter(map(namespace_of, newest))
        for name, count in namespaces.most_common(1):
            if len(namespaces) > 1 and namespaces.total() >= _FEWEST_ENTRIES and count > namespaces.total() / 2:
                whose = f"the namespace {name}" if name else "traces without a namespace"
                share = f"{count / namespaces.total():.0%} of the newest entries of the log {log.space}"
                yield "advice", f"{whose}: {share}, which all others are compared with: give it a fleet of its own"
