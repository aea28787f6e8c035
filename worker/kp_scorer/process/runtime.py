"""What a worker process holds open: opened before it takes work, closed when it has nothing in hand, in reverse order."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, TypeVar

import structlog
from celery import Celery
from threadpoolctl import ThreadpoolController

from kp_scorer.broker.backlog import Backlog, look_at_backlog
from kp_scorer.broker.dead_queue import DeadQueue
from kp_scorer.broker.intake import Intake
from kp_scorer.broker.publishing import broker_shortcomings, declare_queues, send_again
from kp_scorer.broker.queues import results_queues, results_streams, submission_queues
from kp_scorer.broker.results import Publisher
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.embedding import Embedder
from kp_scorer.errors import EmbedderSick, ServiceUnavailable
from kp_scorer.process.delivery_spans import DeliverySpans
from kp_scorer.process.observer import Observer
from kp_scorer.process.pipeline import Hands, Pipeline
from kp_scorer.process.reconciler import Reconciler
from kp_scorer.process.repeating import Chores
from kp_scorer.process.reporting import Condition, report_of
from kp_scorer.process.settling import Settling
from kp_scorer.process.stages import WatchedStages
from kp_scorer.process.watchdog import StallTimer, VitalThread
from kp_scorer.settings import EmbeddingSettings, RecipeName, Settings
from kp_scorer.spans import Recorder
from kp_scorer.store import Store

_RECONCILE_EVERY_S: Final = 10.0
_RENEW_EVERY_S: Final = 1.0
_DRAIN_EVERY_S: Final = 2.0
_MOVE_EVERY_S: Final = 0.2
_SHADOW_EVERY_S: Final = 0.2
_LOOK_EVERY_S: Final = 10.0
_SILENT_S: Final = 10.0
"""What a worker does every second or two and has not done for so long, it cannot do."""

log = structlog.get_logger("kp_scorer.process.runtime")

Found = TypeVar("Found")
LoadEmbedder = Callable[[EmbeddingSettings, RecipeName], Embedder | None]


class Runtime:
    """Everything that one process needs to decide traces."""

    def __init__(self, settings: Settings, app: Celery, load_embedder: LoadEmbedder, node: str, recorder: Recorder) -> None:
        """Connect to Redis and the broker, load the embedder, read the novelty log.

        ``node`` is what monitors call the worker, ``recorder`` is told how messages end, and is not closed here.

        Raises:
            SettingsError: the embedder is required and missing, or a setting cannot be used.
            ServiceUnavailable: Redis or the broker could not be reached within ``worker.patience_s``.
        """
        self._app = app
        self._settings = settings
        self._node = node
        self._recorder = recorder
        self.is_ready = False
        """Whether the worker has begun to consume."""
        self.is_stopping = False
        """Whether it was told to stop."""
        self._pipeline: Pipeline | None = None
        self._backlog: tuple[float, Backlog | None] = time.monotonic(), None
        self.heartbeat = StallTimer()
        self.observer = Observer(settings.scoring.domains)
        """What the parts report to."""
        with ExitStack() as opened:
            self.store = opened.enter_context(Store.open(settings, self.observer.buried))
            _wait_for("redis", self.store.ping, settings.worker.patience_s)
            self._queues = submission_queues(settings)
            self._wait_for_queues()
            _warn_of_shortcomings(settings, app, self.store)
            self._publisher = Publisher(app, settings, self.store)
            novelty = self._novelty = _open_novelty(settings, self.store, load_embedder)
            self.embedder = novelty.embedder.name if novelty else "none"
            """The name of what embeds, for display."""
            decider = Decider(
                self.store.ledger,
                settings.scoring.policy(),
                novelty,
                settings.worker.max_attempts,
                shadow=settings.shadow.policy(),
            )
            self._stages = WatchedStages(decider, _token_counter(novelty), self.observer)
            if self._publisher.shadow is not None:
                opened.callback(self._publisher.shadow.flush)
            self._chores = opened.enter_context(Chores())
            self._renewing = self._chores.start("renew_lease", self._renew, _RENEW_EVERY_S)
            self._start_others(self._chores)
            self._opened = opened.pop_all()

    def _wait_for_queues(self) -> None:
        """Declare all queues, and look at the streams: a worker whose decisions would be refused does not begin to decide."""
        settings, queues, patience_s = self._settings, self._queues, self._settings.worker.patience_s
        intake = [queues.intake] if queues.intake else []
        declared = [*queues.in_order, *intake, *results_queues(settings, settings.outcomes).values()]
        _wait_for("broker", lambda: declare_queues(self._app, declared), patience_s)
        for name in results_streams(settings).values():
            _wait_for("redis", self.store.decision_stream(name).unread, patience_s)

    @property
    def threads(self) -> Sequence[VitalThread]:
        """All that must be alive as long as the runtime is open."""
        return self._chores.threads

    def _start_others(self, chores: Chores) -> None:
        """Start the threads that do what else is to be done beside the messages in hand."""
        app, queues, settings = self._app, self._queues, self._settings
        reconciler = Reconciler(app, queues, self.store, settings.ledger, self.observer)
        every_s = min(_RECONCILE_EVERY_S, settings.ledger.resend_after_s / 4)
        chores.start("reconcile", reconciler.reconcile, every_s)
        if queues.dead is not None:
            dead_queue = DeadQueue(app, queues.dead, self.store.dead_letters, self._publisher, settings)
            chores.start("drain_dead_queue", dead_queue.drain, _DRAIN_EVERY_S)
        if queues.intake is not None:
            chores.start("move_intake", Intake(app, queues, queues.intake, self.store.dead_letters).move, _MOVE_EVERY_S)
        if (shadow := self._publisher.shadow) is not None:
            chores.start("publish_shadow", shadow.publish, _SHADOW_EVERY_S)
        if settings.metrics.port:
            chores.start("look_at_backlog", self._look_at_backlog, _LOOK_EVERY_S)

    def begin(self, hands: Hands, on_sick: Callable[[EmbedderSick], None]) -> Pipeline:
        """Start the pipeline that takes messages in hand; ``hands`` let go of them. For ``on_sick`` see there."""
        settings = self._settings
        spans = DeliverySpans(self._recorder, self._publisher.destinations, self.observer.counted_as)
        pipeline = self._pipeline = Pipeline(
            self._stages,
            Settling(self._app, self._publisher, self.store.dead_letters, settings.limits, self.observer, spans),
            hands,
            batch_size=settings.worker.batch_size,
            # Only RabbitMQ takes a message away from a worker that holds it for long.
            hold_s=math.inf if settings.broker.is_redis else settings.broker.hold_s,
            send_again=lambda delivery: send_again(self._app, self._queues.traces, delivery.message),
            on_sick=on_sick,
        )
        self._opened.callback(pipeline.stop)
        return pipeline

    def _renew(self) -> None:
        self.store.ledger.renew()
        self.store.workers.tell(self.store.ledger.worker, report_of(self._node, self.observer.figures(), self.condition()))

    def not_ready(self) -> list[str]:
        """Why the worker takes no work, by what its threads last met with; empty if it does. Any thread may ask."""
        if self.is_stopping:
            return ["it was told to stop"]
        return list(self._lacking()) if self.is_ready else ["it is starting: it connects to Redis and the broker"]

    def _lacking(self) -> Iterator[str]:
        if self._renewing.failure or self._renewing.since_done_s() > _SILENT_S:
            yield f"redis: {self._renewing.failure or 'it does not answer'}"
        elif self._stages.behind_s() > _SILENT_S:
            # Without Redis this goes without saying.
            yield f"novelty log: last read to its end {self._stages.behind_s():.0f} s ago"
        if not self.heartbeat.is_running:
            yield "broker: there is no connection to it"
        elif self.heartbeat.elapsed_s() > _SILENT_S:
            yield f"broker: last listened to {self.heartbeat.elapsed_s():.0f} s ago"

    def condition(self) -> Condition:
        """How the worker is at the moment; any thread may ask."""
        novelty = self._novelty
        embedder = novelty.embedder if novelty else None
        looked_at, backlog = self._backlog
        return Condition(
            not_ready=tuple(self.not_ready()),
            in_hand=self._pipeline.in_hand if self._pipeline else 0,
            embedder={"embedder": embedder.name, "engine": embedder.engine, "space": embedder.space} if embedder else {},
            window_entries=novelty.cache.entries if novelty else 0,
            mirror_lag_s=self._stages.behind_s() if novelty else 0.0,
            backlog=backlog,
            backlog_age_s=time.monotonic() - looked_at,
        )

    def _look_at_backlog(self) -> None:
        backlog = look_at_backlog(self._app, self._settings, self.store)
        self._backlog = time.monotonic(), backlog

    def close(self) -> None:
        """Finish the batch in hand and let go of everything."""
        self._opened.close()


def _open_novelty(settings: Settings, store: Store, load_embedder: LoadEmbedder) -> NoveltyMeter | None:
    """Load the embedder and read the log of its space; None without an embedder."""
    started = time.perf_counter()
    embedder = load_embedder(settings.embedding, settings.novelty.recipe)
    if embedder is None:
        log.warning("no_embedder", novelty=0.5, detail="every trace gets this novelty: install kp-scorer[embedding]")
        return None
    loaded_ms = round((time.perf_counter() - started) * 1_000)
    log.info("embedder_loaded", embedder=embedder.name, engine=embedder.engine, space=embedder.space, duration_ms=loaded_ms)
    # The other threads of numpy's matrix products spin for a while after each, on the cores that the engine embeds with: some
    # 2 ms of processor time a trace, where one thread takes a hundredth of that for the product.
    ThreadpoolController().select(internal_api="openblas").limit(limits=1)
    novelty = NoveltyMeter(embedder, store.novelty_log(embedder.space), settings.novelty.window())
    # Redis answered a moment ago; it may still be loading its file, or have gone away since.
    entries = _wait_for("redis", novelty.cache.catch_up, settings.worker.patience_s)
    log.info("novelty_log_read", entries=entries)
    return novelty


def _token_counter(novelty: NoveltyMeter | None) -> Callable[[], int]:
    """How many tokens were embedded by now; 0 for ever where none are counted."""
    return lambda: novelty.embedder.tokens_embedded if novelty else 0


def _warn_of_shortcomings(settings: Settings, app: Celery, store: Store) -> None:
    """Say what the Redis of the store, and that of the queues if it is another, is not set up for."""
    found = {"redis": store.shortcomings}
    if settings.broker.is_redis and settings.broker.url != settings.redis.url:
        found["broker"] = partial(broker_shortcomings, app)
    for service, look in found.items():
        try:
            for detail in look():
                log.warning("redis_unsuitable", service=service, detail=detail)
        except ServiceUnavailable as error:
            # A user that may not ask can do everything else.
            log.warning("redis_unsuitable", service=service, detail=f"cannot be looked at: {error}")


def _wait_for(service: str, reach: Callable[[], Found], patience_s: float) -> Found:
    """Wait for a service that starts together with the worker; give up after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return reach()
        except ServiceUnavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning("service_unavailable", service=service, detail=str(error))
            time.sleep(1.0)
