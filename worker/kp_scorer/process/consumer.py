"""Celery's consumer, but for the messages it would log and throw away: they become dead letters first."""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import structlog
from celery.exceptions import Ignore, Reject
from celery.worker.consumer import Consumer

from kp_scorer.broker.publishing import described
from kp_scorer.broker.task_message import bury_poison, bury_unread, checked_id, deliveries_by, task_in
from kp_scorer.errors import InvalidTrace, Reason, ScorerError
from kp_scorer.logs import raised_at
from kp_scorer.process.holding import PAUSE_S, Holding, ignore
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.process.remote_control import RemoteControl
from kp_scorer.process.tasks import dead_result, store_result
from kp_scorer.settings import Settings

_LEFT_OUT: Final = (
    # Tells monitors that the worker lives, from the thread that consumes, and tries for ever: on a broker connection that has
    # gone dead that thread would never get to notice.
    "celery.worker.consumer.heart:Heart",
    # Makes 28 exchanges and 28 queues for tasks with a countdown as soon as it sees a quorum queue; there are no such tasks.
    "celery.worker.consumer.delayed_delivery:DelayedDelivery",
)

_REPLACED: Final = {"celery.worker.consumer.control:Control": RemoteControl}

_HEARTBEAT_S: Final = 1.0

log = structlog.get_logger("kp_scorer.process.consumer")


class KeepingConsumer(Consumer):  # type: ignore[misc]  # celery ships no types
    """Keeps what never reaches the task.

    Bodies that are not JSON, messages that are no task, and tasks that are not ours. Some would otherwise stop the worker, and
    the next one that gets the message, and so on. What does end its workers, whatever it is, is kept once it was delivered
    ``broker.delivery_limit`` times.
    """

    def __init__(self, *args: Any, lifecycle: Lifecycle, settings: Settings, worker_options: Any = None, **kwargs: Any) -> None:
        """Keep in the store of the lifecycle's runtime; the other arguments are Celery's."""
        self._lifecycle = lifecycle
        self._delivery_limit = settings.broker.delivery_limit
        self._limits = settings.limits
        self.obeys_commands = settings.worker.obey_commands
        """Whether remote control may change this worker."""
        # By gossip and mingle workers believe what anyone who reaches the broker tells them, such as which tasks are revoked.
        options = {**(worker_options or {}), "without_gossip": True, "without_mingle": True}
        super().__init__(*args, worker_options=options, **kwargs)
        # In place of the worker's own way, which asks the request by a name that Celery has overridden.
        self.on_task_request = lambda request: request.run_in(self.pool)

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]  # celery ships no types
        """Celery's, without what is left out."""

        default_steps: ClassVar = [
            _REPLACED.get(step, step) for step in Consumer.Blueprint.default_steps if step not in _LEFT_OUT
        ]

    def register_with_event_loop(self, hub: Any) -> None:
        """Begin to consume, and to say so once a second."""
        super().register_with_event_loop(hub)
        heartbeat = self._lifecycle.runtime.heartbeat
        heartbeat.start()
        hub.call_repeatedly(_HEARTBEAT_S, heartbeat.start)

    def on_close(self) -> None:
        """Let go of a connection."""
        # Without a connection, Celery tries to get another for as long as it takes.
        self._lifecycle.runtime.heartbeat.stop()
        super().on_close()

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Let go of a connection that failed, and of one on which the broker refused something that consuming needs."""
        super().on_connection_error_after_connected(exc)
        if isinstance(exc, self.channel_errors):
            # Celery connects again at once, and is refused again at once.
            log.warning("service_unavailable", service="broker", detail=described(exc))
            time.sleep(PAUSE_S)

    def stop(self) -> None:
        """Take no more, and look after the connection until the pool has finished what is in hand.

        Celery would look at nothing else than the pool: the broker would hear no heartbeat, and get what is acknowledged
        meanwhile only in the end, if it is still there.
        """
        super().stop()
        if not (self.hub and self.connection):
            return
        ended = threading.Event()

        def stop_pool() -> None:
            self.pool.stop()
            ended.set()
            self.hub.call_soon(ignore, None)

        threading.Thread(target=stop_pool, name="stop pool", daemon=True).start()
        try:
            loop = self.hub.create_loop()
            while not ended.is_set():
                next(loop)
        except self.connection_errors + self.channel_errors as error:
            # What was in hand comes back.
            log.warning("connection_lost", detail=type(error).__name__)
        self._lifecycle.runtime.heartbeat.stop()

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """Make what is called with each message."""
        handle = super().create_task_handler(*args, **kwargs)
        return partial(self._handle_or_keep, handle)

    def _handle_or_keep(self, handle: Callable[[Any], None], message: Any) -> None:
        if deliveries_by(message) > self._delivery_limit:
            self._keep(message, partial(self._bury_poison, message))
            return
        try:
            task = task_in(message, self._limits)
        except InvalidTrace as error:
            trace_id = checked_id(message.headers.get("id"))
            self._keep(message, partial(self._bury_unread, message, "invalid", str(error), trace_id))
        except ValueError as error:
            self._keep(message, partial(self._bury_unread, message, "malformed", str(error)))
        except MemoryError as error:
            # What else is in hand takes it. The message is given back, and comes again.
            self._keep(message, partial(_fail, error))
        else:
            # What goes on is ours, so that an error here is one of the connection: it comes back.
            handle(task)

    def _bury_unread(self, message: Any, reason: Reason, detail: str, trace_id: str = "") -> None:
        bury_unread(self._lifecycle.runtime.store, message, reason, detail, trace_id)
        store_result(self.app, message, dead_result(trace_id, reason, detail))

    def _bury_poison(self, message: Any) -> None:
        runtime = self._lifecycle.runtime
        # This delivery has not been tried.
        deliveries = deliveries_by(message) - 1
        decision = bury_poison(runtime.store.dead_letters, message, deliveries, self._limits)
        if decision is not None:
            # Its worker may have died before it was published.
            runtime.publisher.publish(decision)

    def _keep(self, message: Any, bury: Callable[[], None]) -> None:
        """Bury a message in a thread of the pool: one that waited for the store would keep the consumer from its connection."""
        holding = Holding(self._lifecycle, message, time.monotonic(), "message_waits")
        self.pool.apply_async(self._keep_in_pool, (message, bury, holding, self.restart_count), callback=ignore)

    def _keep_in_pool(self, message: Any, bury: Callable[[], None], holding: Holding, connection: int) -> None:
        let_go = partial(message.reject_log_error, requeue=True)
        try:
            with holding:
                self._bury(bury, holding, connection)
            let_go = message.ack_log_error
        except Ignore:
            # Sent again.
            let_go = message.ack_log_error
        except Reject:
            pass
        except Exception as error:
            log.error("message_given_back", detail=type(error).__name__, where=raised_at(error))
            # The queue delivers it again at once; without a pause this would spin.
            self._lifecycle.stopping.wait(PAUSE_S)
        finally:
            # A message belongs to its connection: when that is lost, it comes back by another.
            if self.restart_count == connection:
                self.call_soon_ack(let_go, log, self.connection_errors)

    def _bury(self, bury: Callable[[], None], holding: Holding, connection: int) -> None:
        while self.restart_count == connection:
            try:
                bury()
            except ScorerError as error:
                holding.wait(error)
            else:
                return


def _fail(error: Exception) -> None:
    raise error
