"""Turns the settings into a Celery app, for workers and clients alike."""

import os
import socket
import ssl
from typing import Any, Final

import structlog
from celery import Celery
from celery.loaders.app import AppLoader

from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.wire import largest_body_bytes, largest_message_bytes
from kp_scorer.settings import Settings
from kp_scorer.settings.server_sections import BrokerSettings, RedisSettings
from kp_scorer.store.connection import RenewedCredentials, leave_replicas, renew_credentials, sentinel_options, tls_options

# Only Linux has this option.
_TCP_USER_TIMEOUT: Final = [socket.TCP_USER_TIMEOUT] if hasattr(socket, "TCP_USER_TIMEOUT") else []

log = structlog.get_logger("kp_scorer.broker.celery_app")


class _App(Celery):  # type: ignore[misc]  # celery ships no types
    """A Celery app that connects as our settings say. Celery itself would prefer variables of its own in the environment."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        super().__init__("kp-scorer", set_as_current=False, loader=_Loader)
        self.backend_cls = _result_backend(settings.redis)
        self.conf.update(_configuration(settings))

    def _connection(self, url: str, *args: Any, **kwargs: Any) -> Any:
        broker = self._settings.broker
        connection = super()._connection(broker.server().without_parameters(), *args, **kwargs)
        connection.credential_provider = RenewedCredentials(broker) if broker.is_renewed else None
        return connection

    def _get_backend(self) -> Any:
        backend = super()._get_backend()
        # After a failover, plain connections would stay with the former primary; those made by Sentinel reconnect by
        # themselves.
        if not self.backend_cls.startswith("sentinel"):
            leave_replicas(backend.client.connection_pool)
        renew_credentials(backend.client.connection_pool, self._settings.redis)
        return backend


class _Loader(AppLoader):  # type: ignore[misc]
    """A loader that reads no module of settings."""

    def read_configuration(self, env: str = "") -> dict[str, Any]:
        return {}


def make_celery(settings: Settings) -> Celery:
    """Return a Celery app that knows the broker and the queues of traces, but no task yet."""
    return _App(settings)


def most_in_flight(settings: Settings, least: int = 0) -> int:
    """Return how many messages of each queue may be in flight: ``worker.concurrency``, or ``least`` if that is more."""
    most = max(settings.worker.concurrency, least)
    if len(settings.queues.traces) > 1:
        # A queue that has nearly all turns fills the two groups that are being decided and the one that is being published. It
        # needs a fourth that waits, or the other queues would get its turns.
        most += most // 3
    # RabbitMQ limits only the number of messages in flight, so assume that each has the largest size.
    largest_messages = _in_flight_bytes(settings) // largest_body_bytes(settings.limits)
    return most if settings.broker.is_redis else max(1, min(most, largest_messages))


def _in_flight_bytes(settings: Settings) -> int:
    """Return how many bytes of messages of each queue a worker may have in flight."""
    # An idle queue keeps its share: RabbitMQ sets the limit once, when consuming begins, and any queue may fill at any time.
    return settings.worker.in_flight_bytes // len(settings.queues.traces)


def celery_variables() -> list[str]:
    """Return the names of the environment variables that Celery would read as settings; here they have no effect."""
    return sorted(name for name, value in os.environ.items() if name.startswith("CELERY_") and value)


def remove_celery_variables() -> None:
    """Remove Celery's variables, one of which makes its command purge the queue, from the environment; log their names."""
    if variables := celery_variables():
        log.warning("celery_variables_ignored", variables=variables, instead="our own settings count")
    for name in variables:
        del os.environ[name]


def _configuration(settings: Settings) -> dict[str, Any]:
    broker, redis = settings.broker, settings.redis
    return {
        "broker_url": broker.server().without_parameters(),
        "broker_use_ssl": _broker_tls(broker),
        "broker_transport": f"kp_scorer.broker.{'redis_transport.channel' if broker.is_redis else 'rabbitmq'}:Transport",
        # Retry when Redis answers with an error, for example because it is full; by default Celery exits.
        "broker_channel_error_retry": True,
        "broker_transport_options": _transport_options(settings),
        "broker_connection_timeout": broker.timeout_s,
        # RabbitMQ only: a connection that is silent for twice as many seconds counts as dead.
        "broker_heartbeat": max(1, int(2 * broker.timeout_s)),
        # Each publication makes three attempts; this is long enough for one to end and free its connection.
        "broker_pool_acquire_timeout": 10 * broker.timeout_s,
        "broker_connection_retry_on_startup": True,
        "task_queues": [queues.traces for queues in submission_queues(settings.broker, settings.queues).values()],
        "task_default_queue": settings.queues.first,
        "task_default_exchange": "",
        # A producer that passes ignore_result=False reads its decision from here; for others nothing is stored.
        "redis_backend_use_ssl": tls_options(redis.server()),
        "result_backend_transport_options": {
            # By default, a message would stay in flight for 20 attempts at storing its result, each of up to two minutes.
            "retry_policy": {"max_retries": 1},
            **sentinel_options(redis, broker.timeout_s),
        },
        "redis_socket_timeout": broker.timeout_s,
        "redis_socket_connect_timeout": broker.timeout_s,
        "result_expires": 3600,
        "worker_prefetch_multiplier": 1,
        "worker_pool": "threads",
        "worker_concurrency": most_in_flight(settings),
        "worker_enable_remote_control": settings.worker.remote_control,
        # Without this, Celery warns whenever a connection is lost. There is no task to cancel: the worker decides the traces in
        # flight all the same, and the broker redelivers them.
        "worker_cancel_long_running_tasks_on_connection_loss": True,
    }


def _broker_tls(broker: BrokerSettings) -> dict[str, Any]:
    """Return kombu's options for TLS; without them ``rediss`` is a plain connection, and ``amqps`` verifies no host name."""
    server = broker.server()
    if broker.is_redis or not server.is_tls:
        return tls_options(server)
    files = {name.removeprefix("ssl_"): path for name, path in server.tls_files.items()}
    return {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": server.host.strip("[]"), **files}


def _result_backend(redis: RedisSettings) -> str:
    server = redis.server()
    if server.sentinels:
        sentinels = (server._replace(host=host, port=port) for host, port in server.sentinels.addresses)
        return ";".join(f"sentinel://{sentinel.authority()}/{sentinel.database}" for sentinel in sentinels)
    return server.without_parameters()


def _transport_options(settings: Settings) -> dict[str, Any]:
    broker, limits = settings.broker, settings.limits
    # Have kombu connect only twice before a publication fails; by default it goes on for all of broker.timeout_s.
    retries = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0.0, "interval_max": 0.1}
    if not broker.is_redis:
        return {
            **retries,
            "confirm_publish": True,
            "largest_bytes": largest_body_bytes(limits),
            # Without these timeouts, a declaration or a new channel on a dead connection waits forever.
            "read_timeout": broker.timeout_s,
            "write_timeout": broker.timeout_s,
            # By default, amqp 5.4.2 drops a connection if data is not received within a second. Each message in flight then
            # counts as delivered once more.
            "socket_settings": {option: int(broker.timeout_s * 1_000) for option in _TCP_USER_TIMEOUT},
        }
    return {
        **retries,
        **sentinel_options(broker, broker.timeout_s),
        "visibility_timeout": broker.visibility_timeout_s,
        # Without these timeouts, a publish or a worker waits forever for a peer that has vanished.
        "socket_timeout": broker.timeout_s,
        "socket_connect_timeout": broker.timeout_s,
        "socket_keepalive": True,
        # A worker drops a connection whose reply is this many seconds overdue.
        "health_check_interval": max(1, int(5 * broker.timeout_s)),
        # The seconds between sweeps, which renew the messages in flight and requeue those of dead workers.
        "unacked_restore_interval": 1,
        "largest_bytes": largest_message_bytes(limits),
        "in_flight_bytes": _in_flight_bytes(settings),
    }
