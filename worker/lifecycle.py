"""What a worker process owns: opened before it takes work, closed after its last task, in reverse order."""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, TypeVar

import structlog
from celery import Celery, signals

from worker.batcher import MicroBatcher
from worker.broker import submission_queues
from worker.dead_letters import DeadLetters
from worker.dead_queue import DeadQueue
from worker.decider import Decider, NoveltyStage, Prepared, Settled
from worker.embedding import Embedder
from worker.errors import ScorerError, ServiceUnavailable, SettingsError
from worker.keys import Keys
from worker.ledger import RedisLedger
from worker.logs import configure_logs
from worker.novelty import NoveltyCache, RedisLog, Window
from worker.publishing import declare_queues
from worker.reconciler import Reconciler
from worker.redis_client import connect, unavailable_if_down
from worker.results import Publisher
from worker.settings import EmbeddingSettings, Settings
from worker.trace import ReasoningTrace
from worker.watchdog import Stopwatch, Watchdog

_RECONCILE_AT_MOST_EVERY_S: Final = 10.0
_DRAIN_EVERY_S: Final = 2.0

log = structlog.get_logger("worker.lifecycle")

Found = TypeVar("Found")
LoadEmbedder = Callable[[EmbeddingSettings], Embedder | None]


class Scorer:
    """Everything the tasks of one process share."""

    def __init__(self, settings: Settings, app: Celery, load_embedder: LoadEmbedder) -> None:
        """Connect to Redis and the broker, load the embedder, read the novelty log, start the batcher.

        Raises:
            SettingsError: the embedder is required and missing, or a setting cannot be used.
            ServiceUnavailable: Redis or the broker could not be reached within ``worker.patience_s``.
        """
        self._closing = ExitStack()
        keys = Keys(settings.redis.prefix)
        client = connect(settings.redis)
        self._closing.callback(client.close)
        _wait_for("redis", lambda: _ping(client), settings.worker.patience_s)
        self.limits = settings.limits.limits()
        self.ledger = RedisLedger(client, keys, settings.ledger.ttl_ms)
        self.dead_letters = DeadLetters(client, keys, settings.ledger.ttl_ms)
        self.beat = Stopwatch()
        queues = submission_queues(settings)
        _wait_for("broker", lambda: declare_queues(app, queues), settings.worker.patience_s)
        self.publisher = Publisher(app, settings)

        novelty = _open_novelty(settings, client, load_embedder)
        decider = Decider(self.ledger, settings.scoring.policy(), novelty, settings.worker.max_attempts)
        self.batcher: MicroBatcher[ReasoningTrace, Prepared, Settled] = MicroBatcher(decider, settings.worker.batch_size)
        self._closing.callback(self.batcher.stop)
        reconciler = Reconciler(app, queues, self.ledger, self.dead_letters, settings.ledger)
        every_s = min(_RECONCILE_AT_MOST_EVERY_S, settings.ledger.resend_after_s / 4)
        self._closing.callback(_repeat("reconciler", reconciler.reconcile, every_s))
        if not settings.broker.is_redis:
            dead_queue = DeadQueue(app, settings, self.dead_letters)
            self._closing.callback(_repeat("dead queue", dead_queue.drain, _DRAIN_EVERY_S))

    def close(self) -> None:
        """Finish the batch in hand and let go of everything."""
        self._closing.close()


def _open_novelty(settings: Settings, client: Any, load_embedder: LoadEmbedder) -> NoveltyStage | None:
    """Load the embedder and read the log of its space; None without an embedder."""
    started = time.perf_counter()
    embedder = load_embedder(settings.embedding)
    if embedder is None:
        log.warning("no_embedder", novelty=0.5)
        return None
    loaded_ms = round((time.perf_counter() - started) * 1_000)
    log.info("embedder_loaded", embedder=embedder.name, engine=embedder.engine, space=embedder.space, duration_ms=loaded_ms)
    keys, window = Keys(settings.redis.prefix), Window.of(settings.novelty)
    novelty_log = RedisLog(client, keys, embedder.space, window, settings.ledger.ttl_ms, settings.novelty.vector_dtype)
    stage = NoveltyStage(embedder, NoveltyCache(novelty_log, window, embedder.dimensions))
    # Reading needs a transaction, which Redis refuses while it is full.
    entries = _wait_for("redis", stage.cache.catch_up, settings.worker.patience_s)
    log.info("novelty_log_read", entries=entries)
    return stage


def _repeat(name: str, work: Callable[[], None], every_s: float) -> Callable[[], None]:
    """Do something again and again in a thread of its own, and return what ends it."""
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(every_s):
            try:
                work()
            except ServiceUnavailable as error:
                log.warning("put_off", what=name, detail=str(error))
            except Exception as error:
                log.error("put_off", what=name, detail=type(error).__name__)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def _ping(client: Any) -> None:
    with unavailable_if_down("redis.url"):
        client.ping()


def _wait_for(service: str, reach: Callable[[], Found], patience_s: float) -> Found:
    """Wait for a service that starts together with the worker; give up after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return reach()
        except ServiceUnavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning(f"{service}_unavailable", detail=str(error))
            time.sleep(1.0)


class Lifecycle:
    """Ties a scorer to the Celery worker that runs the app."""

    def __init__(self, app: Celery, settings: Settings, load_embedder: LoadEmbedder) -> None:
        """Hook into the worker's signals; nothing is opened before a worker starts."""
        self._load_embedder = load_embedder
        self._app = app
        self._settings = settings
        self._scorer: Scorer | None = None
        self._shutdown = Stopwatch()
        self.stopping = threading.Event()
        """Set once the worker is to end: tasks that wait for something give their messages back."""
        signals.setup_logging.connect(self._set_up_logging, weak=False)
        signals.worker_init.connect(self._open, weak=False)
        signals.worker_ready.connect(self._ready, weak=False)
        signals.worker_shutting_down.connect(self._begin_to_stop, weak=False)
        signals.worker_shutdown.connect(self._close, weak=False)

    @property
    def scorer(self) -> Scorer:
        """The process's scorer; there is one from the worker's start to its end."""
        assert self._scorer is not None, "score_trace runs in a worker"
        return self._scorer

    def _set_up_logging(self, **_: Any) -> None:
        configure_logs(self._settings.log)

    def _open(self, sender: Any, **_: Any) -> None:
        # Celery sets up logging only after worker_init, and what happens here is worth a line.
        configure_logs(self._settings.log)
        try:
            if _pool_name(sender.pool_cls) not in ("threads", "solo"):
                raise SettingsError("pool: expected threads, so that one process loads one model and batches its tasks")
            self._scorer = Scorer(self._settings, self._app, self._load_embedder)
            self._watch(self._scorer)
        except ScorerError as error:
            log.error("worker_cannot_start", detail=str(error))
            raise SystemExit(error.exit_code) from error

    def _watch(self, scorer: Scorer) -> None:
        limit_s = self._settings.worker.decision_timeout_s
        watchdog = Watchdog()
        watchdog.watch("batcher", scorer.batcher.still_s, limit_s)
        watchdog.watch("consumer", scorer.beat.elapsed_s, limit_s)
        watchdog.watch("shutdown", self._shutdown.elapsed_s, self._settings.worker.grace_s)

    def _begin_to_stop(self, **_: Any) -> None:
        self._shutdown.start()
        self.stopping.set()
        if self._scorer is not None:
            # What cannot be finished in good time must still be given back in time.
            hurry = threading.Timer(self._settings.worker.grace_s / 2, self._scorer.batcher.give_up)
            hurry.daemon = True
            hurry.start()

    def _ready(self, **_: Any) -> None:
        # What is there now stays for good. Looking through it for garbage would stop all threads for 60 to 90 ms each time.
        gc.collect()
        gc.freeze()
        log.info("worker_ready", queue=self._settings.queues.traces, concurrency=self._settings.worker.concurrency)

    def _close(self, sender: Any, **_: Any) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
            log.info("worker_stopped")
        # Celery's command tells its caller, who does not tell the process's: a broken worker would seem to have ended well.
        if sender.exitcode:
            raise SystemExit(sender.exitcode)


def _pool_name(pool: Any) -> str:
    """Celery gives the pool as its alias, or as the class that the command line made of it."""
    module = str(pool if isinstance(pool, str) else pool.__module__)
    return {"celery.concurrency.thread": "threads", "celery.concurrency.solo": "solo"}.get(module, module)
