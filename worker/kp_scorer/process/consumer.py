"""Celery's consumer, but for the messages it would log and throw away: they become dead letters first."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final

import structlog
from celery.worker.consumer import Consumer

from kp_scorer.broker.task_message import bury_poison, deliveries_by, largest_message_bytes, raw_body
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.process.lifecycle import Lifecycle
from kp_scorer.settings import Settings

_LEFT_OUT: Final = (
    # Tells monitors that the worker lives, from the thread that consumes, and tries for ever: on a broker connection that has
    # gone dead that thread would never get to notice.
    "celery.worker.consumer.heart:Heart",
    # Makes 28 exchanges and 28 queues for tasks with a countdown as soon as it sees a quorum queue; there are no such tasks.
    "celery.worker.consumer.delayed_delivery:DelayedDelivery",
)

_HEARTBEAT_S: Final = 1.0
_RETRY_S: Final = 5.0

log = structlog.get_logger("kp_scorer.process.consumer")


class KeepingConsumer(Consumer):  # type: ignore[misc]  # celery ships no types
    """Keeps what never reaches the task.

    Bodies that are not JSON, messages that are no task, tasks that are not ours, and task messages without what Celery needs.
    Some of the last kind would otherwise stop the worker, and the next one that gets the message, and so on. What does end its
    workers, whatever it is, is kept once it was delivered ``broker.delivery_limit`` times.
    """

    def __init__(self, *args: Any, lifecycle: Lifecycle, settings: Settings, **kwargs: Any) -> None:
        """Keep in the store of the lifecycle's runtime; the other arguments are Celery's."""
        self._lifecycle = lifecycle
        self._delivery_limit = settings.broker.delivery_limit
        self._largest_bytes = largest_message_bytes(settings.limits)
        super().__init__(*args, **kwargs)

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]  # celery ships no types
        """Celery's, without what is left out."""

        default_steps: ClassVar = [step for step in Consumer.Blueprint.default_steps if step not in _LEFT_OUT]

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

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        """Make what is called with each message."""
        handle = super().create_task_handler(*args, **kwargs)
        return partial(self._handle_or_keep, handle)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Keep a body that is not JSON."""
        self._keep_malformed(message, f"body: expected JSON ({type(exc).__name__})")

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Keep what is no task message."""
        self._keep_malformed(message, "message: expected a Celery task message")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Keep a task that is not ours."""
        self._keep_malformed(message, "task: expected score_trace")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Keep a task message without what Celery needs."""
        self._keep_malformed(message, _not_valid(exc))

    def _handle_or_keep(self, handle: Callable[[Any], None], message: Any) -> None:
        if deliveries_by(message.headers) > self._delivery_limit:
            self._bury(message, self._bury_poison)
            return
        try:
            if len(message.body) > self._largest_bytes:
                raise ValueError("too large to be parsed")
            # Celery would call the task with arguments of any kind, and acknowledge when that fails.
            _check_arguments(message.payload)
            _forget_expiry(message)
        except Exception as error:
            # Whatever it is, it is no fault of the connection.
            self._keep_malformed(message, _not_valid(error))
            return
        try:
            handle(message)
        except Exception as error:
            # Celery reconnects on the connection's errors, and the message comes back. Kombu counts KeyError among
            # those of Redis, but here it is a header that is missing, in every worker that gets the message.
            if isinstance(error, self.connection_errors + self.channel_errors) and not isinstance(error, KeyError):
                raise
            self._keep_malformed(message, _not_valid(error))

    def _keep_malformed(self, message: Any, detail: str) -> None:
        self._bury(message, partial(self._bury_malformed, detail=detail))

    def _bury_malformed(self, message: Any, detail: str) -> None:
        dead_letters = self._lifecycle.runtime.store.dead_letters
        dead_letters.bury(raw_body(message), "malformed", detail, attempts=deliveries_by(message.headers))

    def _bury_poison(self, message: Any) -> None:
        # This delivery has not been tried.
        deliveries = deliveries_by(message.headers) - 1
        bury_poison(self._lifecycle.runtime.store.dead_letters, message, deliveries, self._largest_bytes)

    def _bury(self, message: Any, bury: Callable[[Any], None]) -> None:
        try:
            bury(message)
        except ServiceUnavailable as error:
            # Held on to until it can be kept, as a task does.
            log.warning("message_waits", detail=str(error))
            self.hub.call_later(_RETRY_S, self._bury, message, bury)
        else:
            message.ack()


def _not_valid(error: Exception) -> str:
    return f"message: expected a valid Celery task message ({type(error).__name__})"


def _check_arguments(payload: Any) -> None:
    """Raise ValueError unless a decoded body has the arguments of a task: ``[args, kwargs, embed]``, or an object with them."""
    if isinstance(payload, dict):
        # Of an object that has neither, a bare trace for instance, nothing would reach the task.
        if not payload.keys() & {"args", "kwargs"}:
            raise ValueError("arguments of a task are missing")
        payload = payload.get("args", []), payload.get("kwargs", {}), None
    args, kwargs, embed = payload
    # Celery fails on another kind of embed in the thread that would run the task, where nothing acknowledges or rejects.
    if not (isinstance(args, list | tuple) and isinstance(kwargs, dict) and isinstance(embed, dict | None)):
        raise ValueError("arguments of a task are a list and an object")


def _forget_expiry(message: Any) -> None:
    """Celery acknowledges an expired task unseen, so its trace would be neither decided nor kept; a late decision is better."""
    for holder in (message.headers, message.payload):
        if isinstance(holder, dict):
            holder.pop("expires", None)
