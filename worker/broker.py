"""The Celery side of the settings: one way to make an app, for workers and clients alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from worker.errors import ServiceUnavailable
from worker.settings import Settings

TASK_NAME: Final = "score_trace"


def make_celery(settings: Settings) -> Celery:
    """Make an app that knows the broker and the queue of traces, and no task yet."""
    app = Celery("kp-scorer", set_as_current=False)
    app.conf.update(_configuration(settings))
    return app


def plain_queue(name: str) -> Queue:
    """A durable queue on the default exchange: on Redis a plain list, with no binding set whose loss would drop messages."""
    return Queue(name, exchange=Exchange(""), routing_key=name)


@contextmanager
def unavailable_if_down(what: str) -> Iterator[None]:
    """Turn the broker's connection trouble into ServiceUnavailable."""
    try:
        yield
    except (OperationalError, OSError) as error:
        raise ServiceUnavailable(f"{what}: cannot reach the broker ({type(error).__name__}: {error})") from error


def _configuration(settings: Settings) -> dict[str, Any]:
    broker, redis = settings.broker, settings.redis
    return {
        "broker_url": broker.url,
        "broker_transport_options": _transport_options(settings),
        "broker_connection_timeout": broker.timeout_s,
        "broker_connection_retry_on_startup": True,
        "task_queues": [plain_queue(settings.queues.traces)],
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
    if not broker.url.startswith(("redis://", "rediss://", "redis+socket://", "sentinel://")):
        return {"confirm_publish": True}
    return {
        "visibility_timeout": broker.visibility_timeout_s,
        # Without these a publish, or a worker whose peer has vanished, waits for ever.
        "socket_timeout": broker.timeout_s,
        "socket_connect_timeout": broker.timeout_s,
        "socket_keepalive": True,
        "health_check_interval": 25,
        # By default a worker looks for what the dead have left every 100 seconds, and gives back 10 messages at a time.
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # A worker that died while it restored messages must not keep the others from doing so for five minutes.
        "unacked_mutex_expire": 10,
    }
