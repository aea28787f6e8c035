"""Celery's consumer, but for the messages it would log and throw away: they become dead letters first."""

from collections.abc import Callable
from typing import Any

import structlog
from celery.worker.consumer import Consumer

from worker.dead_letter import DeadLetters
from worker.errors import ServiceUnavailable

log = structlog.get_logger("worker.consumer")


def keeping_consumer(dead_letters: Callable[[], DeadLetters]) -> type[Consumer]:
    """Make the consumer class of an app; ``dead_letters`` is asked for when there is something to keep.

    What reaches it never reaches the task: bodies that are not JSON, messages that are no task, tasks that are not ours, and
    task messages without what Celery needs. Some of the last kind would otherwise stop the worker, and the next one that gets
    the message, and so on.
    """

    class KeepingConsumer(Consumer):  # type: ignore[misc]  # celery ships no types
        def create_task_handler(self, *args: Any, **kwargs: Any) -> Callable[[Any], None]:
            handle = super().create_task_handler(*args, **kwargs)

            def handle_or_keep(message: Any) -> None:
                try:
                    # Celery would call the task with arguments of any kind, and acknowledge when that fails.
                    _check_arguments(message.payload)
                    handle(message)
                except self.connection_errors + self.channel_errors:
                    # Celery reconnects on these, and the message comes back.
                    raise
                except Exception as error:
                    _keep(message, f"message: expected a valid Celery task message ({type(error).__name__})")

            return handle_or_keep

        def on_decode_error(self, message: Any, exc: Exception) -> None:
            _keep(message, f"body: expected JSON ({type(exc).__name__})")

        def on_unknown_message(self, body: Any, message: Any) -> None:
            _keep(message, "message: expected a Celery task message")

        def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
            _keep(message, "task: expected score_trace")

        def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
            _keep(message, f"message: expected a valid Celery task message ({type(exc).__name__})")

    def _keep(message: Any, detail: str) -> None:
        body = message.body if isinstance(message.body, bytes) else str(message.body).encode("utf-8", "surrogatepass")
        try:
            dead_letters().put(body, "malformed", detail)
        except ServiceUnavailable as error:
            # Not acknowledged, so it comes back.
            log.warning("trace_given_back", detail=str(error))
        else:
            log.warning("trace_dead", trace_id="", reason="malformed", detail=detail)
            message.ack()

    return KeepingConsumer


def _check_arguments(payload: Any) -> None:
    """Raise ValueError unless a decoded body has the arguments of a task: ``[args, kwargs, embed]``, or an object with both."""
    args, kwargs, _ = (payload.get("args", []), payload.get("kwargs", {}), None) if isinstance(payload, dict) else payload
    if not (isinstance(args, list | tuple) and isinstance(kwargs, dict)):
        raise ValueError("arguments of a task are a list and an object")
