"""The start of the road: the consumer receives and reads messages, and later acknowledges or requeues them."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final

import structlog
from celery.worker.consumer import Consumer
from celery.worker.state import maybe_shutdown

from kp_scorer.broker.calls import described
from kp_scorer.broker.headers import PACKED_BY, deliveries_by, queued_ms
from kp_scorer.broker.publishing import acknowledge_all
from kp_scorer.broker.wire import arguments_in, checked_id, only_argument, raw_body, trace_id_of
from kp_scorer.decision import Received
from kp_scorer.decoding import check_late_outcome, check_trace, decode_trace, is_late_outcome
from kp_scorer.errors import InvalidTrace
from kp_scorer.limits import Limits, is_surely_within
from kp_scorer.process.acknowledge import RETRY_AFTER_S
from kp_scorer.process.delivery import Delivery
from kp_scorer.process.runtime import Runtime
from kp_scorer.process.startup import StartupRetry
from kp_scorer.store.dead_letters import DeadLettering

_DELAYED_DELIVERY: Final = "celery.worker.consumer.delayed_delivery:DelayedDelivery"
"""With a quorum queue, Celery 5.7.0 declares 28 exchanges and 28 queues for tasks with a countdown, which no trace has."""

_HEARTBEAT_S: Final = 1.0
_REFUSED_WITHIN_S: Final = 5.0  # A refused consumer tries again every second. After this long without a refusal, it receives.
_TRUSTED_DELIVERIES: Final = 2  # The consumer reads a message itself up to this delivery; from the next, the last stage does.

log = structlog.get_logger("kp_scorer.process.consumer")


def server_of(connection: Any) -> str:
    """Return the host and port of a kombu connection; if it has several sentinels, those of the first."""
    server = connection.info()
    return f"{server['hostname']}:{server['port']}"


class KeepingConsumer(Consumer):  # type: ignore[misc]  # celery ships no types
    """Celery's consumer, except that it dead-letters messages that Celery would log and discard.

    Some messages would otherwise stop this worker, then the next one that receives them, and so on. A message that returns for
    the second time may be one of those. The last stage reads it, after noting the attempt in Redis.
    """

    def __init__(
        self, *args: Any, runtime: Runtime, limits: Limits, queues: Sequence[str], worker_options: Any = None, **kwargs: Any
    ) -> None:
        """Override Celery's arguments by which a worker would obey, or wait for, other clients of the broker."""
        self._runtime = runtime
        self._limits = limits
        # With gossip and mingle, workers believe whatever any client of the broker sends them, such as a list of revoked tasks.
        # The events' heartbeat is sent by the consuming thread, which would wait forever on a dead connection.
        options = {**(worker_options or {}), "without_gossip": True, "without_mingle": True, "without_heartbeat": True}
        changed = {"task_events": False, "initial_prefetch_count": runtime.most_in_flight()}
        super().__init__(*args, worker_options=options, **{**kwargs, **changed})
        self._connected_at_s = 0.0
        self._refusal, self._refused_at_s = "", -math.inf
        self._queues = queues
        self._pipeline = runtime.start_pipeline(self, self.why_not_consuming)

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]  # celery ships no types
        """Celery's steps except delayed delivery."""

        default_steps: ClassVar = [step for step in Consumer.Blueprint.default_steps if step != _DELAYED_DELIVERY]

    def register_with_event_loop(self, hub: Any) -> None:
        """Start to consume, and restart the watchdog's heartbeat every second."""
        super().register_with_event_loop(hub)
        self._runtime.heartbeat.start()
        hub.call_repeatedly(_HEARTBEAT_S, self._runtime.beat)

    def why_not_consuming(self) -> str:
        """Return why it does not receive from all queues of traces though it is connected; empty if it does."""
        if time.monotonic() - self._refused_at_s < _REFUSED_WITHIN_S:
            return self._refusal
        if self.task_consumer and all(map(self.task_consumer.consuming_from, self._queues)):
            return ""
        return f"it does not consume {', '.join(self._queues)}, as Celery's options or control say"

    def on_close(self) -> None:
        """Close a connection."""
        # Reconnecting may take long, and a running heartbeat would count that time as a stall.
        self._runtime.heartbeat.stop()
        if self.hub:
            # Kombu 5.7.0 adds a callback for each connection to Redis and never removes it (kombu#2492), which leaks 28 kB.
            self.hub.on_tick.clear()
        super().on_close()

    def ensure_connected(self, conn: Any) -> Any:
        """Connect to the broker, however long that takes, once Redis answers."""
        # Without Redis, messages would only wait; and RabbitMQ counts a lost connection as a delivery of all messages on it.

        def log_failure(error: Exception, _interval_s: float) -> None:
            log.error("consumer: Cannot connect to", server=server_of(conn), detail=described(error))

        StartupRetry(math.inf, maybe_shutdown).wait_for("redis", self._runtime.store.ping)
        try:
            connected = conn.ensure_connection(log_failure, callback=maybe_shutdown)
        except self.connection_errors + self.channel_errors as error:
            # RabbitMQ refuses this user. Celery would try five times a second, and log no reason but critical tracebacks.
            log_failure(error, RETRY_AFTER_S)
            time.sleep(RETRY_AFTER_S)
            raise
        self._connected_at_s = time.monotonic()
        return connected

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Close the connection after it has failed, or after the broker has refused something that the consumer needs."""
        log.warning("connection_lost", server=server_of(self.connection), detail=described(exc))
        super().on_connection_error_after_connected(exc)
        is_refused = isinstance(exc, self.channel_errors)
        if is_refused:
            log.warning("service_unavailable", service="broker", detail=described(exc))
        if is_refused or time.monotonic() - self._connected_at_s < RETRY_AFTER_S:
            # This is a backoff: Celery 5.7.0 would reconnect at once, and a server that accepts connections and serves none, as
            # a replica does, would end them at once. Every fifth time it would log a critical traceback.
            self._refusal, self._refused_at_s = described(exc), time.monotonic()
            time.sleep(RETRY_AFTER_S)

    def stop(self) -> None:
        """Stop gracefully: receive no more; serve the connection, for its acknowledgements, until nothing is in flight."""
        super().stop()
        if not (self.hub and self.connection):
            return
        ended = threading.Event()

        def wait() -> None:
            self._pipeline.wait_until_empty()
            # The loop runs this after the acknowledgements, which are queued already.
            self.hub.call_soon(ended.set)

        threading.Thread(target=wait, name="wait for the pipeline", daemon=True).start()
        try:
            loop = self.hub.create_loop()
            while not ended.is_set():
                next(loop)
        except self.connection_errors + self.channel_errors as error:
            # There is nothing left to wait for: the broker redelivers the messages that were in flight.
            log.warning("connection_lost", server=server_of(self.connection), detail=described(error))
        self._runtime.heartbeat.stop()

    def create_task_handler(self, *_: Any, **__: Any) -> Callable[[Any], None]:
        """Return the function that receives each message; it replaces Celery's requests and thread pool."""
        return self._receive

    def _receive(self, message: Any) -> None:
        """Read a message and pass it to the pipeline, without waiting for a server: the connection must be served meanwhile."""
        delivery = Delivery(message, self.restart_count, self._queue_of(message))
        deliveries, waited_ms = deliveries_by(message), queued_ms(message, delivery.received_at_s)
        delivery.received = Received(worker=self._runtime.node, queued_ms=waited_ms, deliveries=deliveries)
        self._runtime.metrics.count_delivery(delivery.queue, deliveries)
        # One redelivery says little: a worker's death returns all its messages, and RabbitMQ counts each lost connection as
        # one.
        delivery.is_suspect = deliveries > _TRUSTED_DELIVERIES
        try:
            if not delivery.is_suspect:
                self.read(delivery)
        except BaseException as error:
            # A panic in a native library raises a BaseException, which would end the worker.
            self._pipeline.put(delivery, error)
        else:
            self._pipeline.put(delivery)

    def _queue_of(self, message: Any) -> str:
        """Return the queue that a message came from; on RabbitMQ by the consumer's tag, as producers choose routing keys."""
        queue, tag = message.delivery_info.get("routing_key"), message.delivery_info.get("consumer_tag")
        if tag and self.task_consumer:
            tags = self.task_consumer._active_tags  # noqa: SLF001 - kombu's own
            queue = next((name for name, active in tags.items() if active == tag), None)
        return queue if queue in self._queues else self._queues[0]

    def read(self, delivery: Delivery) -> None:
        """Set a delivery's trace, or the reason why its message gets no decision. Any thread may do so."""
        message, limits, deliveries = delivery.message, self._limits, deliveries_by(delivery.message)
        try:
            args, kwargs = arguments_in(message, limits)
        except InvalidTrace as error:
            trace_id = checked_id(message.headers.get("id"))
            delivery.dead_lettering = DeadLettering("invalid", str(error), trace_id, deliveries=deliveries)
            return
        except ValueError as error:
            delivery.dead_lettering = DeadLettering("malformed", str(error), deliveries=deliveries)
            return
        payload: Any = None
        try:
            payload = only_argument(args, kwargs)
            if is_late_outcome(payload):
                delivery.trace = check_late_outcome(payload, limits)
                return
            # Most messages are small. Encoding each as JSON again, only to know its exact size, would take half of the time.
            is_small = PACKED_BY not in message.headers and is_surely_within(raw_body(message), limits)
            delivery.trace = (check_trace if is_small else decode_trace)(payload, limits)
        except InvalidTrace as error:
            delivery.dead_lettering = DeadLettering("invalid", str(error), trace_id_of(payload), deliveries=deliveries)

    def acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge messages, all of them in one round trip."""
        self.call_soon_ack(self._acknowledge, deliveries)

    def requeue(self, delivery: Delivery) -> None:
        """Requeue a message, unless its connection is lost."""
        self.call_soon_ack(self._requeue, delivery)

    def has_lost(self, delivery: Delivery) -> bool:
        """Return whether a message's connection is lost, so that the broker redelivers it on another."""
        return bool(delivery.connection != self.restart_count)

    def _acknowledge(self, deliveries: Sequence[Delivery]) -> None:
        messages = [delivery.message for delivery in deliveries if not self.has_lost(delivery)]
        try:
            acknowledge_all(messages)
        except Exception as error:
            # The broker redelivers them. An error here would skip the other calls that are due in Celery's loop.
            log.warning("messages_not_acknowledged", messages=len(messages), detail=type(error).__name__)

    def _requeue(self, delivery: Delivery) -> None:
        if not self.has_lost(delivery):
            delivery.message.reject_log_error(log, (Exception,), requeue=True)
