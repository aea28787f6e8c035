"""Starts a worker: waits for its services, and loads and checks everything that it needs before it consumes."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import structlog
from celery import Celery
from redis.exceptions import BusyLoadingError
from threadpoolctl import ThreadpoolController

from kp_scorer.broker.calls import declare_queues
from kp_scorer.broker.queues import SubmissionQueues, results_queues, results_streams
from kp_scorer.decider import open_gate, open_pins
from kp_scorer.embedding.embedder import Embedder
from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.gate import Gate
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import EmbeddingSettings, GateSettings, NoveltySettings, RecipeName, RoutingSettings
from kp_scorer.store import Store
from kp_scorer.store.condition import Condition

log = structlog.get_logger("kp_scorer.process.startup")

Answer = TypeVar("Answer")
LoadEmbedder = Callable[[EmbeddingSettings, RecipeName], Embedder | None]


@dataclass
class StartupRetry:
    """Retries for ``patience_s`` while services start together with the worker, and longer while Redis loads its file."""

    patience_s: float
    on_wait: Callable[[], None]  # Called at every second of waiting.
    waits_for: str = ""  # The service that it waits for, and the error; empty if it does not wait. Any thread may read it.

    def wait_for(self, service: str, reach: Callable[[], Answer], is_endless: Callable[[], bool] = lambda: False) -> Answer:
        """Retry until a service answers, and return its answer.

        Raises its ServiceUnavailable after ``patience_s``, unless ``is_endless`` returns True.
        """
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                answer = reach()
            except ServiceUnavailable as error:
                if _is_loading(error):
                    deadline = time.monotonic() + self.patience_s
                elif time.monotonic() > deadline and not is_endless():
                    raise
                self.waits_for = f"{service}: {error}"
                log.warning("service_unavailable", service=service, detail=str(error))
                self.on_wait()
                time.sleep(1.0)
            else:
                self.waits_for = ""
                return answer


def _is_loading(error: BaseException | None) -> bool:
    """Return whether an error means that Redis has restarted and is loading its file."""
    return error is not None and (isinstance(error, BusyLoadingError) or _is_loading(error.__context__))


def wait_for_services(
    settings: Settings, app: Celery, store: Store, queues: Collection[SubmissionQueues], startup: StartupRetry
) -> None:
    """Load the scripts, declare all queues and read the streams: a worker that cannot publish must not decide.

    Raises SettingsError if a setting cannot be used; ServiceUnavailable if a service cannot be reached for ``patience_s``.
    """
    startup.wait_for("redis", store.ping)
    startup.wait_for("redis", store.ledger.load_scripts)
    declared = [*(queue for each in queues for queue in each.in_order), *results_queues(settings, settings.kinds).values()]
    startup.wait_for("broker", lambda: declare_queues(app, declared))
    for intake in (each.intake for each in queues if each.intake):
        try:
            startup.wait_for("broker", partial(declare_queues, app, [intake]))
        except SettingsError as error:
            # A producer that may declare the intake can make it a queue of another kind. That must not stop the workers.
            log.error("intake_unusable", queue=intake.name, detail=str(error))
    for name in results_streams(settings, settings.kinds):
        startup.wait_for("redis", store.decision_stream(name).count_unread)


def open_novelty(
    settings: NoveltySettings, embedding: EmbeddingSettings, store: Store, load_embedder: LoadEmbedder, startup: StartupRetry
) -> NoveltyMeter | None:
    """Load the embedder, read the log of its space and return the meter of novelty; return None without an embedder.

    Raises the errors of :func:`wait_for_services`.
    """
    started = time.perf_counter()
    embedder = load_embedder(embedding, settings.recipe)
    pins = open_pins(settings, store, embedder)
    if embedder is None:
        if embedding.embedder != "none":
            log.warning("no_embedder", novelty=0.5, detail="every trace gets this novelty: install kp-scorer[embedding]")
        return None
    loaded_ms = round((time.perf_counter() - started) * 1_000)
    log.info("embedder_loaded", embedder=embedder.name, engine=embedder.engine, space=embedder.space, duration_ms=loaded_ms)
    # After each matrix product, numpy's other threads spin for a while on the cores that the engine needs: some 2 ms of
    # processor time a trace, while the product takes one thread a hundredth of that.
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)
    if pins:
        # Wait without end for a missing set: an operator has to pin it, and with `up` this is possible only once its Redis
        # runs.
        startup.wait_for("redis", pins.refresh, is_endless=lambda: bool(pins.missing))
    own_log = store.novelty_log(embedder.space)
    novelty = NoveltyMeter(embedder, own_log, settings.window(), pins, settings.unreadable)
    # Redis answered a moment ago, but may have gone away since.
    log.info("novelty_log_read", entries=startup.wait_for("redis", novelty.cache.catch_up))
    return novelty


def open_facts(
    routing: RoutingSettings, bounds: GateSettings, store: Store, novelty: NoveltyMeter | None, startup: StartupRetry
) -> Gate | None:
    """Open the gate and read its facts; return None where the score decides. Raises like :func:`wait_for_services`."""
    facts = store.facts(novelty.embedder.space if novelty else "")
    if gate := open_gate(routing, bounds, novelty, facts):
        store.ledger.facts = facts
        startup.wait_for("redis", gate.catch_up)
        log.info("gate_opened", kept=gate.kept_count)
    return gate


class ServerWatch:
    """Logs each shortcoming of a Redis when it appears, as operators may change its configuration at any time."""

    def __init__(self) -> None:
        self._logged: frozenset[tuple[str, str]] = frozenset()
        self._blocked = ""
        # The reasons why servers lose submissions or accept none. Any thread may read this.
        self.not_ready: tuple[str, ...] = ()

    def look(self, servers: Mapping[str, Condition], blocked: str = "") -> None:
        """Log the new shortcomings of servers, and why RabbitMQ is ``blocked`` if it was not before."""
        if blocked and not self._blocked:
            log.error("broker_blocked", detail=blocked)
        self._blocked = blocked
        # The remedy identifies a shortcoming; the rest of the text may be a figure, which changes all the time.
        found = {(name, text.partition(": ")[2]): text for name, server in servers.items() for text in server.shortcomings}
        for key, detail in found.items():
            if key not in self._logged:
                log.warning("redis_unsuitable", service=key[0], detail=detail)
        self._logged = frozenset(found)
        evicting = (f"{name}: {server.evicts}" for name, server in servers.items() if server.evicts)
        self.not_ready = (*evicting, *filter(None, [blocked]))
