"""Celery's consumer, but for the messages it would log and throw away: they become dead letters first."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import structlog
from celery.worker.consumer import Consumer

from kp_scorer.broker.burying import bury_poison, bury_unread, said_of_poison
from kp_scorer.broker.publishing import acknowledge_all, described
from kp_scorer.broker.task_message import TaskMessage, checked_id, deliveries_by, only_argument, task_in, trace_id_of
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import InvalidTrace, Reason
from kp_scorer.process.delivery import Burial, Delivery, SubmissionRequest
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.process.pipeline import PAUSE_S
from kp_scorer.process.remote_control import RemoteControl
from kp_scorer.process.settling import burial_of, dead_result
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
        # In place of a thread of the pool for each.
        self.on_task_request = self._begin
        self._pipeline = lifecycle.begin(self)

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
        """Take no more, and look after the connection until nothing is in hand.

        Otherwise the broker would hear no heartbeat, and get what is acknowledged meanwhile only in the end, if it is there.
        """
        super().stop()
        if not (self.hub and self.connection):
            return
        ended = threading.Event()

        def wait() -> None:
            self._pipeline.wait_until_empty()
            # In its turn, so after what is to be acknowledged.
            self.hub.call_soon(ended.set)

        threading.Thread(target=wait, name="wait for the pipeline", daemon=True).start()
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
        deliveries = deliveries_by(message)
        self._lifecycle.runtime.observer.delivered(deliveries)
        if deliveries > self._delivery_limit:
            # This delivery has not been tried.
            self._keep_poison(message, deliveries - 1)
            return
        try:
            task = task_in(message, self._limits)
        except InvalidTrace as error:
            self._keep_unread(message, "invalid", str(error), checked_id(message.headers.get("id")))
        except ValueError as error:
            self._keep_unread(message, "malformed", str(error))
        except MemoryError as error:
            # What else is in hand takes it. The message is given back, and comes again.
            self._keep(message, Burial(partial(_fail, error), {}))
        else:
            # What goes on is ours, so that an error here is one of the connection: it comes back.
            handle(task)

    def _begin(self, request: SubmissionRequest) -> None:
        """Take a submission in hand."""
        task: TaskMessage = request.message
        delivery = Delivery(task.sent, self.restart_count, request)
        payload: Any = None
        try:
            payload = only_argument(request.args, request.kwargs)
            delivery.trace = decode_trace(payload, self._limits)
        except InvalidTrace as error:
            letters = self._lifecycle.runtime.store.dead_letters
            delivery.burial = burial_of(task.sent, trace_id_of(payload), "invalid", str(error), letters, self._limits)
        except BaseException as error:
            # Not only an Exception: what a native library raises when it panics is none, and would end the worker.
            delivery.burial = Burial(partial(_fail, error), {})
        self._pipeline.put(delivery)

    def _keep_unread(self, message: Any, reason: Reason, detail: str, trace_id: str = "") -> None:
        letters = self._lifecycle.runtime.store.dead_letters
        bury = partial(bury_unread, letters, message, reason, detail, trace_id)
        self._keep(message, Burial(bury, dead_result(trace_id, reason, detail)))

    def _keep_poison(self, message: Any, deliveries: int) -> None:
        letters = self._lifecycle.runtime.store.dead_letters
        bury = partial(bury_poison, letters, message, deliveries, self._limits)
        result = dead_result(checked_id(message.headers.get("id")), "poison", said_of_poison(deliveries))
        self._keep(message, Burial(bury, result))

    def _keep(self, message: Any, burial: Burial) -> None:
        """Bury a message by way of the pipeline: waiting for the store here would keep the consumer from its connection."""
        delivery = Delivery(message, self.restart_count)
        delivery.burial = burial
        self._pipeline.put(delivery)

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Let go of messages for good, all of them in one round trip."""
        self.call_soon_ack(self._acknowledge, deliveries)

    def give_back(self, delivery: Delivery) -> None:
        """Have a message delivered again, if it does not come again by itself."""
        self.call_soon_ack(self._give_back, delivery)

    def has_lost(self, delivery: Delivery) -> bool:
        """Whether a message is gone with its connection: then it comes again by another."""
        return bool(delivery.connection != self.restart_count)

    def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        held = [delivery.message for delivery in deliveries if not self.has_lost(delivery)]
        try:
            acknowledge_all(held)
        except Exception as error:
            # They come again. An error here would take along what else Celery's loop was about to do.
            log.warning("messages_not_acknowledged", messages=len(held), detail=type(error).__name__)
        # In this thread, as Celery looks through its requests in it, and sends what monitors are told.
        for delivery in deliveries:
            delivery.end()
        self._count_let_go(len(deliveries))

    def _give_back(self, delivery: Delivery) -> None:
        if not self.has_lost(delivery):
            delivery.message.reject_log_error(log, (Exception,), requeue=True)
        delivery.let_go()
        self._count_let_go(1)

    def _count_let_go(self, messages: int) -> None:
        # After a lost connection Celery takes fewer messages, until it knows that what it had in hand has ended.
        for _ in range(messages):
            self._restore_prefetch_count_after_connection_restart(None)


def _fail(error: BaseException) -> None:
    raise error
