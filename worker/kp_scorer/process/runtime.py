"""The runtime of a worker process, from Celery's first signal to its last: start, readiness, and shutdown at SIGTERM."""

import atexit
import gc
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import structlog
from celery import Celery, signals
from celery.apps.worker import _reload_current_worker
from celery.utils.debug import cry
from celery.utils.nodenames import NODENAME_DEFAULT, nodename, nodesplit
from celery.worker import state

from kp_scorer.broker.backlog import conditions, look_at_backlog
from kp_scorer.broker.celery_app import most_in_flight
from kp_scorer.broker.publishing import send_again
from kp_scorer.broker.queues import submission_queues, system_of
from kp_scorer.broker.results import Publisher
from kp_scorer.checks.asking import Checks
from kp_scorer.decider import Decider
from kp_scorer.embedding.select import may_use_gpu
from kp_scorer.errors import EmbedderUnhealthy, ScorerError, SettingsError
from kp_scorer.logs import configure_logs, count_dropped_lines, raised_at
from kp_scorer.monitoring import http_server
from kp_scorer.process.acknowledge import Acknowledger
from kp_scorer.process.maintenance import start_maintenance
from kp_scorer.process.memory import limit_malloc_arenas
from kp_scorer.process.metrics import Metrics
from kp_scorer.process.pipeline import Pipeline
from kp_scorer.process.publish import PublishStage
from kp_scorer.process.startup import LoadEmbedder, ServerWatch, StartupRetry, open_facts, open_novelty, wait_for_services
from kp_scorer.process.watchdog import PeriodicTasks, StallTimer, Supervisor, Watchdog
from kp_scorer.reviser import Reviser
from kp_scorer.settings import Settings
from kp_scorer.spans import is_export_configured, open_recorder
from kp_scorer.store import Store
from kp_scorer.store.store import WorkerReport

_RENEW_EVERY_S: Final = 1.0
_SILENT_S: Final = 10.0  # A worker is not ready if its lease, mirror or heartbeat has not been renewed for this long.
_LAST_SPANS_S: Final = 2.0  # The time to export the last spans, if the grace leaves that much.

log = structlog.get_logger("kp_scorer.process.runtime")


class Runtime:
    """Everything that one process needs to decide traces: opened by Celery's signals, closed in reverse order."""

    def __init__(self, app: Celery, settings: Settings, load_embedder: LoadEmbedder) -> None:
        """Connect to the worker's signals; nothing is opened before a worker starts."""
        self._app = app
        self._settings = settings
        self._load_embedder = load_embedder
        self.node = ""  # The name of this worker in Celery.
        self._supervisor = Supervisor(os.environ)
        # During a wait, each call gives the start another minute; otherwise systemd would end the worker.
        self._startup = StartupRetry(
            settings.worker.patience_s, partial(self._supervisor.notify, "EXTEND_TIMEOUT_USEC=60000000")
        )
        self._servers = ServerWatch()
        self._opened = ExitStack()
        self._pipeline: Pipeline | None = None
        self._is_ready = self._is_stopping = False
        self._ending = threading.Lock()
        self._shutdown = StallTimer()
        self.heartbeat = StallTimer()  # Runs as long as the consumer has a connection.
        signals.celeryd_init.connect(self._name_node, weak=False)
        signals.setup_logging.connect(lambda **_: configure_logs(settings.log), weak=False)
        signals.worker_init.connect(self._open, weak=False)
        signals.worker_ready.connect(self._ready, weak=False)
        signals.worker_shutting_down.connect(self._start_shutdown, weak=False)
        signals.worker_shutdown.connect(self._close, weak=False)

    def _name_node(self, instance: Any, **_: Any) -> None:
        # Celery's tools show two nodes of the same name as one, and each would obey the other's remote control.
        name, host = nodesplit(instance.hostname)
        if name == NODENAME_DEFAULT:
            instance.hostname = nodename(f"scorer-{os.getpid()}", host)
        self.node = instance.hostname
        # Celery prints a banner and a farewell to stdout, which programs may read. On a terminal they go to stderr instead;
        # elsewhere they are left out, as they are not log lines.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        if not sys.stderr.isatty():
            instance.quiet = True
            sys.__stdout__ = None  # type: ignore[misc]

    def _open(self, sender: Any, **_: Any) -> None:
        try:
            # Celery names the pool by its alias, or by the class that the command line derived from it.
            pool = str(getattr(sender.pool_cls, "__module__", sender.pool_cls)).removeprefix("celery.concurrency.")
            if pool not in ("threads", "thread", "solo"):
                raise SettingsError("pool: expected threads, so that one process loads one model and batches its tasks")
            with ExitStack() as opened:
                self._open_all(opened)
                self._opened = opened.pop_all()
        except ScorerError as error:
            log.error("worker_cannot_start", detail=str(error))
            raise SystemExit(error.exit_code) from error
        except Exception as error:
            # Celery would hide the error, and start without a runtime.
            log.critical("worker_cannot_start", error=type(error).__name__, where=raised_at(error))
            raise SystemExit(1) from error

    def _open_all(self, opened: ExitStack) -> None:
        settings, app = self._settings, self._app
        if not may_use_gpu(settings.embedding):
            # With a GPU, all cores tokenize. In two arenas, the threads of 16 cores waited for each other, 12 ms a trace.
            limit_malloc_arenas()
        self._watchdog = Watchdog(when_well=self._supervisor.feed)
        metrics = self.metrics = Metrics(settings.scoring.domains, settings.checks.names, settings.queues.traces)
        count_dropped_lines(metrics.log_lines_dropped.inc)
        # This comes first, so that a worker answers that it is alive while it loads its model.
        opened.enter_context(http_server(settings.metrics, metrics.registry, self._watchdog.why_not_live, self._not_ready))
        self._recorder = open_recorder(system_of(settings.broker), self.node) if is_export_configured() else None
        opened.callback(self._close_recorder)
        self.store = opened.enter_context(Store.open(settings))
        self.store.dead_letters.on_stored = metrics.count_dead_letter
        self.store.dead_letters.on_dropped = metrics.count_dropped
        self._queues = submission_queues(settings.broker, settings.queues)
        wait_for_services(settings, app, self.store, self._queues.values(), self._startup)
        looking = partial(conditions, app, settings.broker, settings.redis, self.store)
        self._servers.look(self._startup.wait_for("redis", looking))
        self._publisher = Publisher(app, settings, self.store, metrics.count_decisions_dropped)
        self._novelty = open_novelty(settings.novelty, settings.embedding, self.store, self._load_embedder, self._startup)
        self._decider = Decider(
            self.store.ledger,
            settings.scoring,
            self._novelty,
            settings.worker.max_attempts,
            names_nearest=settings.results.nearest,
            checks=Checks(settings.checks) if settings.checks.names else None,
            sample=settings.review.sample,
            gate=open_facts(settings.routing, settings.gate, self.store, self._novelty, self._startup),
        )
        self._connect_metrics()
        tasks = self._tasks = opened.enter_context(PeriodicTasks())
        self._lease_renewer = tasks.start("lease_renewer", self._renew, _RENEW_EVERY_S)
        start_maintenance(tasks, app, list(self._queues.values()), settings, self.store, metrics, self._look_at_backlog)
        self._watchdog.watch_threads(tasks.threads)
        self._watchdog.watch("consumer", self.heartbeat.elapsed_s, settings.decision_timeout_s)
        self._watchdog.watch("shutdown", self._shutdown.elapsed_s, settings.worker.grace_s)

    def _connect_metrics(self) -> None:
        """Connect the gauges to the state that they show; they read it at each scrape."""
        metrics, novelty = self.metrics, self._novelty
        metrics.ready.set_function(lambda: not self._not_ready())
        metrics.degraded.set(novelty is None and self._settings.embedding.embedder != "none")
        shown: dict[str, str] = {}
        if novelty is not None:
            mirror, embedder = novelty.cache.mirror, novelty.embedder
            metrics.window_entries.set_function(lambda: len(mirror))
            shown = {"embedder": embedder.name, "engine": embedder.engine, "space": embedder.space}
        metrics.set_info(self._settings.alike(), **shown)

    def start_pipeline(self, acknowledger: Acknowledger, why_not_consuming: Callable[[], str]) -> Pipeline:
        """Start the pipeline and have it watched; ``acknowledger`` acknowledges and requeues its messages."""
        self._why_not_consuming = why_not_consuming
        settings = self._settings
        pipeline = self._pipeline = Pipeline(
            self._decider,
            Reviser(self.store.ledger, settings.routing.policy, settings.worker.max_attempts),
            PublishStage(self._app, self._publisher, self.store.dead_letters, settings, self.metrics, self._recorder),
            acknowledger,
            self.metrics,
            group_size=self._group_size(),
            weights={name: queue.weight for name, queue in settings.queues.traces.items()},
            # Only RabbitMQ takes back messages that stay unacknowledged for too long.
            hold_s=math.inf if settings.broker.is_redis else settings.broker.hold_s,
            resend=lambda delivery: send_again(self._app, self._queues[delivery.queue].traces, delivery.message),
            on_fatal=self._shut_down,
        )
        self._opened.callback(pipeline.stop)
        self.metrics.waited_s.set_function(pipeline.waited_s)
        limit_s = settings.decision_timeout_s
        self._watchdog.watch_threads(pipeline.threads)
        self._watchdog.watch("deciding", pipeline.deciding_stalled_s, limit_s)
        # Publishing has three attempts, each of which waits for a connection and for the broker's answers.
        self._watchdog.watch("message", pipeline.delivery_stalled_s, limit_s + 60 * settings.broker.timeout_s)
        return pipeline

    @property
    def _pass_texts(self) -> int:
        return self._novelty.embedder.pass_texts if self._novelty else 0

    def _group_size(self) -> int:
        size = max(self._settings.worker.batch_size, self._pass_texts)
        # Queues take turns by weight only if several groups fit in flight. On RabbitMQ the limit in flight depends on the size
        # of the largest message, so it may be too low for groups of the full size.
        return size if len(self._queues) == 1 else max(1, min(size, self.most_in_flight() // 4))

    def most_in_flight(self) -> int:
        """Return how many messages of each queue may be in flight: with a GPU, three passes, of which two are being decided."""
        return most_in_flight(self._settings, 3 * self._pass_texts)

    def _ready(self, **_: Any) -> None:
        # The objects that exist now are permanent. Scanning them in each collection would stop all threads for 60 to 90 ms.
        gc.collect()
        gc.freeze()
        self._is_ready = True
        # Replace Celery's handler, which prints many lines between those of the log.
        signal.signal(signal.SIGUSR1, lambda *_: log.warning("stacks", exception=cry()))
        log.info(
            "worker_ready",
            queue=", ".join(self._queues),
            concurrency=self.most_in_flight(),
            embedder=self._novelty.embedder.name if self._novelty else "none",
        )
        self._supervisor.notify("READY=1")

    def beat(self) -> None:
        """Restart the heartbeat's timer, and end the process if another part has stalled for too long."""
        self.heartbeat.start()
        # The watchdog's thread is not enough: if it died, a stalled worker would renew its leases forever.
        self._watchdog.end_if_stalled()

    def _renew(self) -> None:
        self.store.ledger.renew(self._report().model_dump_json())
        self.store.ledger.load_scripts()

    def _report(self) -> WorkerReport:
        failing = {task.name: task.failure for task in self._tasks.threads if task.failure}
        return self.metrics.report(self.node, self._not_ready(), self._publisher.full(), failing)

    def _look_at_backlog(self) -> None:
        backlog = look_at_backlog(self._app, self._settings, self.store, [self._report()])
        self.metrics.set_backlog(backlog)
        self._servers.look(backlog.servers, backlog.blocked)

    def _not_ready(self) -> Sequence[str]:
        """Return the reasons why the worker receives no messages; empty if it receives them. Any thread may call this."""
        if stalled := self._watchdog.why_not_live():
            return stalled
        if self._is_stopping:
            return ["it was told to stop"]
        if not self._is_ready:
            return [f"it is starting: {self._startup.waits_for or 'it loads its model, or connects to the broker'}"]
        return list(self._lacking())

    def _lacking(self) -> Iterator[str]:
        if self._lease_renewer.failure or self._lease_renewer.stall.elapsed_s() > _SILENT_S:
            yield f"redis: {self._lease_renewer.failure or 'it does not answer'}"
        elif self._pipeline and (behind_s := self._pipeline.commit_stage.behind.elapsed_s()) > _SILENT_S:
            # An outage of Redis implies this one, so the outage is reported instead.
            yield f"novelty log: last read to its end {behind_s:.0f} s ago"
        yield from self._servers.not_ready
        if self._novelty and self._novelty.missing:
            yield self._novelty.missing
        if not self.heartbeat.is_running:
            yield "broker: there is no connection to it"
        elif self.heartbeat.elapsed_s() > _SILENT_S:
            yield f"broker: last listened to {self.heartbeat.elapsed_s():.0f} s ago"
        elif reason := self._why_not_consuming():
            yield f"broker: {reason}"

    def _shut_down(self, error: ScorerError) -> None:
        """Shut the worker down as SIGTERM does, but with the error's exit code. Any thread may call it."""
        with self._ending:
            if self._is_stopping:
                return
            event = "embedder_unhealthy" if isinstance(error, EmbedderUnhealthy) else "worker_cannot_go_on"
            log.critical(event, detail=str(error))
            self._start_shutdown()
        # Celery's handler of SIGTERM sets this, and its consumer checks it in each turn of its loop.
        state.should_stop = error.exit_code

    def _start_shutdown(self, **_: Any) -> None:
        """Begin the shutdown: the consumer receives no more messages, and stops once nothing is in flight."""
        self._shutdown.start()
        self._is_stopping = True
        self._supervisor.notify("STOPPING=1")
        if self._pipeline is not None:
            self._pipeline.drain()
            # Half of the grace is for completing messages. The rest is for requeueing those that could not be completed.
            abort = threading.Timer(self._settings.worker.grace_s / 2, self._pipeline.abort)
            abort.daemon = True
            abort.start()

    def _close(self, sender: Any, **_: Any) -> None:
        self._opened.close()
        if self._is_stopping:
            # At SIGHUP, Celery registers that the process starts again when it exits. SIGTERM, before or after that, ends it.
            atexit.unregister(_reload_current_worker)
        log.info("worker_stopped")
        # Celery's command drops the exit code, so a failed worker would seem to have succeeded.
        if sender.exitcode:
            raise SystemExit(sender.exitcode)

    def _close_recorder(self) -> None:
        if self._recorder:
            # A hanging collector may take half of the remaining grace, so that the worker still ends without an error.
            left_s = self._settings.worker.grace_s - self._shutdown.elapsed_s()
            self._recorder.close(min(_LAST_SPANS_S, max(0.0, left_s / 2)))
