"""What a worker process owns: opened before it takes work, closed after its last task, in reverse order."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import structlog
from celery import Celery, signals

from worker.batcher import MicroBatcher
from worker.dead_letter import DeadLetters
from worker.decider import Decider, NoveltyStage
from worker.decision import Decision
from worker.embedding import Embedder
from worker.errors import ScorerError, ServiceUnavailable, SettingsError, TraceConflict
from worker.keys import Keys
from worker.ledger import RedisLedger
from worker.logs import configure_logs
from worker.novelty import NoveltyCache, RedisLog, Window
from worker.redis_client import connect, unavailable_if_down
from worker.results import Publisher
from worker.settings import EmbeddingSettings, Settings
from worker.trace import ReasoningTrace

log = structlog.get_logger("worker.lifecycle")


LoadEmbedder = Callable[[EmbeddingSettings], Embedder | None]


class Scorer:
    """Everything the tasks of one process share."""

    def __init__(self, settings: Settings, app: Celery, load_embedder: LoadEmbedder) -> None:
        """Connect to Redis, load the embedder, read the novelty log, start the batcher.

        Raises:
            SettingsError: the embedder is required and missing, or a setting cannot be used.
            ServiceUnavailable: Redis could not be reached within ``worker.patience_s``.
        """
        self._closing = ExitStack()
        keys = Keys(settings.redis.prefix)
        ledger_ttl_ms = int(settings.ledger.ttl_s * 1_000)
        client = connect(settings.redis)
        self._closing.callback(client.close)
        _wait_for(client, settings.worker.patience_s)
        self.limits = settings.limits.limits()
        self.ledger = RedisLedger(client, keys, ledger_ttl_ms)
        self.dead_letters = DeadLetters(client, keys)
        self.publisher = Publisher(app, settings.queues)

        started = time.perf_counter()
        embedder = load_embedder(settings.embedding)
        novelty = None
        if embedder is None:
            log.warning("no_embedder", novelty=0.5)
        else:
            loaded_ms = round((time.perf_counter() - started) * 1_000)
            log.info(
                "embedder_loaded", embedder=embedder.name, engine=embedder.engine, space=embedder.space, duration_ms=loaded_ms
            )
            window = Window.of(settings.novelty)
            vector_type = settings.novelty.vector_dtype
            novelty_log = RedisLog(client, keys, embedder.space, window, ledger_ttl_ms, vector_type)
            novelty = NoveltyStage(embedder, NoveltyCache(novelty_log, window, embedder.dimensions))
            log.info("novelty_log_read", entries=novelty.cache.catch_up())
        decider = Decider(self.ledger, settings.scoring.policy(), novelty)
        self.batcher: MicroBatcher[ReasoningTrace, Decision | TraceConflict] = MicroBatcher(
            decider.decide, settings.worker.batch_size, idle=decider.refresh
        )
        self._closing.callback(self.batcher.stop)

    def close(self) -> None:
        """Finish the batch in hand and let go of everything."""
        self._closing.close()


def _wait_for(client: Any, patience_s: float) -> None:
    """Wait for a Redis that starts together with the worker; give up after ``patience_s``."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with unavailable_if_down("redis.url"):
                client.ping()
            return
        except ServiceUnavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning("redis_unavailable", detail=str(error))
            time.sleep(1.0)


class Lifecycle:
    """Ties a scorer to the Celery worker that runs the app."""

    def __init__(self, app: Celery, settings: Settings, load_embedder: LoadEmbedder) -> None:
        """Hook into the worker's signals; nothing is opened before a worker starts."""
        self._load_embedder = load_embedder
        self._app = app
        self._settings = settings
        self._scorer: Scorer | None = None
        signals.setup_logging.connect(self._set_up_logging, weak=False)
        signals.worker_init.connect(self._open, weak=False)
        signals.worker_ready.connect(self._ready, weak=False)
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
        except ScorerError as error:
            log.error("worker_cannot_start", detail=str(error))
            raise SystemExit(error.exit_code) from error

    def _ready(self, **_: Any) -> None:
        log.info("worker_ready", queue=self._settings.queues.traces, concurrency=self._settings.worker.concurrency)

    def _close(self, **_: Any) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
            log.info("worker_stopped")


def _pool_name(pool: Any) -> str:
    """Celery gives the pool as its alias, or as the class that the command line made of it."""
    module = str(pool if isinstance(pool, str) else pool.__module__)
    return {"celery.concurrency.thread": "threads", "celery.concurrency.solo": "solo"}.get(module, module)
