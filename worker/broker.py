"""The Celery side of the settings: one way to make an app, for workers and clients alike."""

import socket
from typing import Any, Final

from celery import Celery
from kombu import Exchange, Queue

from worker.decision import Outcome
from worker.settings import Settings

TASK_NAME: Final = "score_trace"

DELIVERY_COUNT: Final = "x-delivery-count"
"""The header in which RabbitMQ, and our Redis transport, say how often a message was given out before."""

# Only Linux has it.
_TCP_USER_TIMEOUT: Final = [socket.TCP_USER_TIMEOUT] if hasattr(socket, "TCP_USER_TIMEOUT") else []


def make_celery(settings: Settings) -> Celery:
    """Make an app that knows the broker and the queue of traces, and no task yet."""
    app = Celery("kp-scorer", set_as_current=False)
    app.conf.update(_configuration(settings))
    return app


def submission_queues(settings: Settings) -> list[Queue]:
    """What must be there before a trace is submitted or taken, in the order to declare it; the queue of traces is the last."""
    queues = settings.queues
    if settings.broker.is_redis:
        return [_queue(queues.traces)]
    return [
        _quorum_queue(queues.dead),
        _quorum_queue(
            queues.traces,
            {
                # What RabbitMQ counts is how often a message has come back, and that may not exceed the limit.
                "x-delivery-limit": settings.broker.delivery_limit - 1,
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": queues.dead,
                # By default RabbitMQ drops a message that the dead-letter queue does not take at once.
                "x-dead-letter-strategy": "at-least-once",
            },
        ),
    ]


def results_queue(settings: Settings, outcome: Outcome) -> Queue:
    """The queue of decisions with this outcome; RabbitMQ takes no more than ``queues.results_limit``, unless that is 0."""
    queues = settings.queues
    name = queues.accepted if outcome == "accepted" else queues.rejected
    if settings.broker.is_redis:
        return _queue(name)
    return _quorum_queue(name, {"x-max-length": queues.results_limit} if queues.results_limit else {})


def largest_message_bytes(settings: Settings) -> int:
    """How large a message may be to be parsed, in bytes.

    A valid submission can be 8 times the limit, as escaped JSON within JSON in base64; and what is somewhat too large is still
    worth a dead letter that says so.
    """
    return 16 * settings.limits.message_bytes + 65_536


def deliveries(count: object) -> int:
    """How often a message has been given out, this time included, by its header ``DELIVERY_COUNT``; 1 where no one counted."""
    return count + 1 if isinstance(count, int) else 1


def _queue(name: str, arguments: dict[str, Any] | None = None) -> Queue:
    """A durable queue on the default exchange: on Redis a plain list, with no binding set whose loss would drop messages."""
    return Queue(name, exchange=Exchange(""), routing_key=name, queue_arguments=arguments)


def _quorum_queue(name: str, arguments: dict[str, Any] | None = None) -> Queue:
    return _queue(name, {"x-queue-type": "quorum", "x-overflow": "reject-publish", **(arguments or {})})


def _configuration(settings: Settings) -> dict[str, Any]:
    broker, redis = settings.broker, settings.redis
    return {
        "broker_url": broker.url,
        "broker_transport": "worker.redis_transport:Transport" if broker.is_redis else None,
        # What Redis answers with an error, as when it is full, is worth another try; Celery's default is to exit.
        "broker_channel_error_retry": True,
        "broker_transport_options": _transport_options(settings),
        "broker_connection_timeout": broker.timeout_s,
        # RabbitMQ only: a connection on which the worker merely listens counts as dead after twice so many seconds.
        "broker_heartbeat": max(1, int(2 * broker.timeout_s)),
        # For all connections to publish on to come free, each is tried three times.
        "broker_pool_acquire_timeout": 10 * broker.timeout_s,
        "broker_connection_retry_on_startup": True,
        "task_queues": submission_queues(settings)[-1:],
        "task_default_queue": settings.queues.traces,
        "task_default_exchange": "",
        "task_default_routing_key": settings.queues.traces,
        "task_serializer": "json",
        "result_serializer": "json",
        "accept_content": ["json"],
        # A producer that passes ignore_result=False gets its decision from here; nobody else pays for it.
        "result_backend": redis.url,
        "result_backend_transport_options": {"visibility_timeout": broker.visibility_timeout_s},
        "task_ignore_result": True,
        "result_expires": 3600,
        "visibility_timeout": broker.visibility_timeout_s,
        # Acknowledged only when decided and published, or dead-lettered; given back when the process dies.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "worker_pool": "threads",
        "worker_concurrency": settings.worker.concurrency,
        # The threads pool cannot cancel a task, and late acks make cancelling needless.
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "enable_utc": True,
    }


def _transport_options(settings: Settings) -> dict[str, Any]:
    broker = settings.broker
    # How often kombu tries to connect before whoever publishes is told; it would try for all of broker.timeout_s.
    retries = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.0, "interval_max": 0.1}
    if not broker.is_redis:
        return {
            **retries,
            "confirm_publish": True,
            # Without these, whoever declares a queue or opens a channel on a dead connection waits for ever.
            "read_timeout": broker.timeout_s,
            "write_timeout": broker.timeout_s,
            # py-amqp gives up on what is not received within a second, and every message in hand counts as given out again.
            "socket_settings": {option: int(broker.timeout_s * 1_000) for option in _TCP_USER_TIMEOUT},
        }
    return {
        **retries,
        "visibility_timeout": broker.visibility_timeout_s,
        # Without these a publish, or a worker whose peer has vanished, waits for ever.
        "socket_timeout": broker.timeout_s,
        "socket_connect_timeout": broker.timeout_s,
        "socket_keepalive": True,
        # How the worker notices the same: a reply this much overdue.
        "health_check_interval": max(1, int(5 * broker.timeout_s)),
        # Seconds between saying which messages are still held, and looking for what dead workers have left.
        "unacked_restore_interval": 1,
        "largest_bytes": largest_message_bytes(settings),
    }
