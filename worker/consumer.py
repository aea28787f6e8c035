"""Celery's consumer, but for the messages it would log and throw away: they become dead letters first."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import structlog
from celery.worker.consumer import Consumer

from worker.broker import DELIVERY_COUNT, deliveries
from worker.dead_letters import DeadLetters, Reason
from worker.errors import ServiceUnavailable
from worker.submission import checked_id, raw_body, submission_in
from worker.watchdog import Stopwatch

_LEFT_OUT: Final = (
    # Tells monitors that the worker lives, from the thread that consumes, and tries for ever: on a broker connection that has
    # gone dead that thread would never get to notice.
    "celery.worker.consumer.heart:Heart",
    # Makes 28 exchanges and 28 queues for tasks with a countdown as soon as it sees a quorum queue; there are no such tasks.
    "celery.worker.consumer.delayed_delivery:DelayedDelivery",
)

_BEAT_S: Final = 1.0
_RETRY_S: Final = 5.0

log = structlog.get_logger("worker.consumer")


class Intake(Protocol):
    """What the consumer needs of the process it runs in."""

    @property
    def dead_letters(self) -> DeadLetters:
        """Where to keep what is no task of ours."""
        ...

    @property
    def beat(self) -> Stopwatch:
        """Restarted whenever the consumer's loop comes round; stopped while there is no connection to consume from."""
        ...


def keeping_consumer(intake: Callable[[], Intake], delivery_limit: int, largest_bytes: int) -> type[Consumer]:
    """Make the consumer class of an app; ``intake`` is asked for when the worker runs.

    What it keeps never reaches the task: bodies that are not JSON, messages that are no task, tasks that are not ours, and task
    messages without what Celery needs. Some of the last kind would otherwise stop the worker, and the next one that gets the
    message, and so on. What does end its workers, whatever it is, is kept once it was given out ``delivery_limit`` times.
    A body of more than ``largest_bytes`` is not parsed.
    """
    own = {"intake": staticmethod(intake), "delivery_limit": delivery_limit, "largest_bytes": largest_bytes}
    return type("KeepingConsumer", (_KeepingConsumer,), own)


class _KeepingConsumer(Consumer):  # type: ignore[misc]  # celery ships no types
    intake: Callable[[], Intake]
    delivery_limit: int
    largest_bytes: int

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]  # celery ships no types
        default_steps: ClassVar = [step for step in Consumer.Blueprint.default_steps if step not in _LEFT_OUT]

    def register_with_event_loop(self, hub: Any) -> None:
        super().register_with_event_loop(hub)
        self.intake().beat.start()
        hub.call_repeatedly(_BEAT_S, self.intake().beat.start)

    def on_close(self) -> None:
        # Without a connection, Celery tries to get another for as long as it takes.
        self.intake().beat.stop()
        super().on_close()

    def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = super().create_task_handler(*args, **kwargs)
        return partial(self._handle_or_keep, handle)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self._keep(message, "malformed", f"body: expected JSON ({type(exc).__name__})")

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self._keep(message, "malformed", "message: expected a Celery task message")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._keep(message, "malformed", "task: expected score_trace")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self._keep(message, "malformed", _not_valid(exc))

    def _handle_or_keep(self, handle: Callable[[Any], None], message: Any) -> None:
        given_out = deliveries(message.headers.get(DELIVERY_COUNT))
        if given_out > self.delivery_limit:
            self._keep(message, "poison", f"given out {given_out - 1} times, and no worker came to an end with it")
            return
        try:
            if len(message.body) > self.largest_bytes:
                raise ValueError("too large to be parsed")
            # Celery would call the task with arguments of any kind, and acknowledge when that fails.
            _check_arguments(message.payload)
            _forget_expiry(message)
        except Exception as error:
            # Whatever it is, it is no fault of the connection.
            self._keep(message, "malformed", _not_valid(error))
            return
        try:
            handle(message)
        except Exception as error:
            # Celery reconnects on the connection's errors, and the message comes back. Kombu counts KeyError among
            # those of Redis, but here it is a header that is missing, in every worker that gets the message.
            if isinstance(error, self.connection_errors + self.channel_errors) and not isinstance(error, KeyError):
                raise
            self._keep(message, "malformed", _not_valid(error))

    def _keep(self, message: Any, reason: Reason, detail: str) -> None:
        payload, trace_id = raw_body(message), ""
        if reason == "poison":
            payload, trace_id = submission_in(payload, self.largest_bytes), checked_id(message.headers.get("id"))
        try:
            self.intake().dead_letters.bury(payload, reason, detail, trace_id, deliveries(message.headers.get(DELIVERY_COUNT)))
        except ServiceUnavailable as error:
            # Held on to until it can be kept, as a task does.
            log.warning("message_waits", detail=str(error))
            self.hub.call_later(_RETRY_S, self._keep, message, reason, detail)
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
