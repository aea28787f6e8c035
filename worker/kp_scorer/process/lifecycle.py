"""When a worker process opens and closes what it holds: its answers to Celery's signals."""

import gc
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import structlog
from celery import Celery, signals
from celery.utils.nodenames import NODENAME_DEFAULT, nodename, nodesplit
from celery.worker import state

from kp_scorer.broker.celery_app import warn_of_celery_variables
from kp_scorer.broker.publishing import destination_of
from kp_scorer.errors import EmbedderSick, ScorerError, SettingsError
from kp_scorer.health import directory_of
from kp_scorer.logs import configure_logs, raised_at
from kp_scorer.process.health_file import health_file
from kp_scorer.process.metrics import WorkerCollector
from kp_scorer.process.metrics_server import metrics_server
from kp_scorer.process.pipeline import Hands, Pipeline
from kp_scorer.process.runtime import LoadEmbedder, Runtime
from kp_scorer.process.supervisor import Supervisor
from kp_scorer.process.watchdog import StallTimer, Watchdog
from kp_scorer.settings import Settings
from kp_scorer.spans import NO_RECORDER, Recorder, open_recorder

_LAST_SPANS_S: Final = 2.0
"""How long a worker that ends waits for the collector, if its grace leaves so much."""

log = structlog.get_logger("kp_scorer.process.lifecycle")


class Lifecycle:
    """Ties a runtime to the Celery worker that runs the app."""

    def __init__(self, app: Celery, settings: Settings, load_embedder: LoadEmbedder) -> None:
        """Hook into the worker's signals; nothing is opened before a worker starts."""
        self._load_embedder = load_embedder
        self._app = app
        self._settings = settings
        self._runtime: Runtime | None = None
        self._recorder: Recorder = NO_RECORDER
        self._shutdown = StallTimer()
        self._pipeline: Pipeline | None = None
        self._watchdog: Watchdog | None = None
        self._supervisor = Supervisor(os.environ)
        self._noting = ExitStack()
        self._node = ""
        self._is_stopping = False
        self._ending = threading.Lock()
        signals.celeryd_init.connect(self._begin, weak=False)
        signals.setup_logging.connect(self._set_up_logging, weak=False)
        signals.worker_init.connect(self._open, weak=False)
        signals.worker_ready.connect(self._ready, weak=False)
        signals.worker_shutting_down.connect(self._begin_to_stop, weak=False)
        signals.worker_shutdown.connect(self._close, weak=False)

    @property
    def runtime(self) -> Runtime:
        """The process's runtime; there is one from the worker's start to its end."""
        assert self._runtime is not None, "only a worker has one"
        return self._runtime

    def begin(self, hands: Hands) -> Pipeline:
        """Start what takes messages in hand; ``hands`` let go of them."""
        pipeline = self._pipeline = self.runtime.begin(hands, on_sick=self.end)
        assert self._watchdog is not None, "there is one as long as there is a runtime"
        limit_s = self._settings.worker.decision_timeout_s
        self._watchdog.watch_threads(pipeline.threads)
        self._watchdog.watch("batcher", pipeline.deciding_s, limit_s)
        # Publishing alone is tried three times, each of which waits for a connection and for the broker's answers.
        timeout_s = max(self._settings.broker.timeout_s, self._settings.redis.timeout_s)
        self._watchdog.watch("message", pipeline.longest_still_s, limit_s + 60 * timeout_s)
        return pipeline

    def end(self, error: EmbedderSick) -> None:
        """End the worker in good order, as SIGTERM would, but with the error's exit code. Any thread may say so, any number."""
        with self._ending:
            if self._is_stopping:
                return
            log.critical("embedder_sick", detail=str(error))
            self._begin_to_stop()
        # What its handler of SIGTERM sets, and its consumer looks at once a turn.
        state.should_stop = error.exit_code

    def _begin(self, instance: Any, **_: Any) -> None:
        # Two nodes of one name get each other's remote control, and are one to whoever inspects them.
        name, host = nodesplit(instance.hostname)
        if name == NODENAME_DEFAULT:
            instance.hostname = nodename(f"scorer-{os.getpid()}", host)
        self._node = instance.hostname
        # Celery greets, and says that it stops, on stdout, which is for programs.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def _set_up_logging(self, **_: Any) -> None:
        configure_logs(self._settings.log)

    def _open(self, sender: Any, **_: Any) -> None:
        # Celery sets up logging only after worker_init, and what happens here is worth a line.
        configure_logs(self._settings.log)
        warn_of_celery_variables()
        try:
            if _pool_name(sender.pool_cls) not in ("threads", "solo"):
                raise SettingsError("pool: expected threads, so that one process loads one model and batches its tasks")
            watchdog = self._watchdog = Watchdog(when_well=self._supervisor.feed)
            # Before there is a runtime: a worker that loads its model is alive.
            directory = directory_of(self._settings.health.directory)
            self._noting.enter_context(health_file(directory, watchdog.stalls, self._not_ready))
            if self._settings.otel.enabled:
                self._recorder = open_recorder(destination_of(self._app, self._settings.queues.traces), self._node)
            self._runtime = Runtime(self._settings, self._app, self._load_embedder, self._node, self._recorder)
            self._watch(watchdog, self._runtime)
            if self._settings.metrics.port:
                self._serve_metrics(self._runtime)
        except ScorerError as error:
            self._noting.close()
            log.error("worker_cannot_start", detail=str(error))
            raise SystemExit(error.exit_code) from error
        except Exception as error:
            # Celery would hide it, and go on without a runtime.
            self._noting.close()
            log.critical("worker_cannot_start", error=type(error).__name__, where=raised_at(error))
            raise SystemExit(1) from error

    def _watch(self, watchdog: Watchdog, runtime: Runtime) -> None:
        limit_s = self._settings.worker.decision_timeout_s
        watchdog.watch_threads(runtime.threads)
        watchdog.watch("consumer", runtime.heartbeat.elapsed_s, limit_s)
        watchdog.watch("shutdown", self._shutdown.elapsed_s, self._settings.worker.grace_s)

    def _serve_metrics(self, runtime: Runtime) -> None:
        collector = WorkerCollector(runtime.observer.figures, runtime.condition)
        self._noting.enter_context(metrics_server(self._settings.metrics, collector))

    def _not_ready(self) -> Sequence[str]:
        """Why the worker takes no work; empty if it does."""
        # Read once: the worker may close it meanwhile.
        if (runtime := self._runtime) is not None:
            return runtime.not_ready()
        starting = "it is starting: it loads its model, or waits for Redis and the broker"
        return ["it was told to stop" if self._is_stopping else starting]

    def _begin_to_stop(self, **_: Any) -> None:
        self._shutdown.start()
        self._is_stopping = True
        self._supervisor.stopping()
        if self._runtime is not None:
            self._runtime.is_stopping = True
        if self._pipeline is not None:
            self._pipeline.hurry()
            # What cannot be finished in good time must still be given back in time.
            giving_up = threading.Timer(self._settings.worker.grace_s / 2, self._pipeline.give_up)
            giving_up.daemon = True
            giving_up.start()

    def _ready(self, **_: Any) -> None:
        # What is there now stays for good. Looking through it for garbage would stop all threads for 60 to 90 ms each time.
        gc.collect()
        gc.freeze()
        self.runtime.is_ready = True
        log.info(
            "worker_ready",
            queue=self._settings.queues.traces,
            concurrency=self._settings.worker.concurrency,
            embedder=self.runtime.embedder,
        )
        self._supervisor.ready()

    def _close(self, sender: Any, **_: Any) -> None:
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
            # Half of what is left of the grace, so that a collector that hangs is no reason to end with an error.
            left_s = self._settings.worker.grace_s - self._shutdown.elapsed_s()
            self._recorder.close(min(_LAST_SPANS_S, max(0.0, left_s / 2)))
            log.info("worker_stopped")
        self._noting.close()
        # Celery's command tells its caller, who does not tell the process's: a broken worker would seem to have ended well.
        if sender.exitcode:
            raise SystemExit(sender.exitcode)


def _pool_name(pool: Any) -> str:
    """Celery gives the pool as its alias, or as the class that the command line made of it."""
    module = str(pool if isinstance(pool, str) else pool.__module__)
    return {"celery.concurrency.thread": "threads", "celery.concurrency.solo": "solo"}.get(module, module)
