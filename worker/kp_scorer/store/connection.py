"""One way to connect to Redis, and one error for whatever goes wrong there."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.settings import RedisSettings

# Broken connections are tried again at once a few times; longer patience is the caller's to choose. What did not answer in
# time is not: redis-py tries each connecting of each try as often again, which made 16 timeouts of one.
_RETRIES = 3
_WORTH_A_RETRY = (redis.exceptions.ConnectionError,)


def connect(settings: RedisSettings) -> redis.Redis:
    """Make a client that gives bytes, bounds every wait and reconnects by itself. Connects on first use.

    Raises:
        SettingsError: the URL is not one that redis-py takes.
    """
    try:
        client = redis.Redis.from_url(
            settings.url,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            socket_keepalive=True,
            health_check_interval=25,
            retry=Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), _RETRIES, _WORTH_A_RETRY),
        )
    except ValueError as error:
        raise SettingsError(f"redis.url: {error}") from None
    leave_replicas(client.connection_pool)
    return client


def leave_replicas(pool: redis.ConnectionPool) -> None:
    """Have the pool's connections, those made from now on, end when their server says that it has become a replica.

    After a failover they would lead to the old primary for ever. Whoever uses one gets the error of a broken connection, and
    connects anew.
    """
    pool.connection_class = type("LeavingConnection", (_LeavesReplicas, pool.connection_class), {})


class _LeavesReplicas:
    """Goes before a class of connections."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **kwargs)
        except redis.exceptions.ResponseError as error:
            if not _is_from_replica(error):
                raise
            connection.disconnect()
            raise redis.exceptions.ConnectionError("the server has become a replica") from None


@contextmanager
def unavailable_if_down(what: str) -> Iterator[None]:
    """Turn whatever redis-py raises into ServiceUnavailable.

    Not only broken connections: a server that is full, read-only, loading or refuses a command is no fault of the trace.
    """
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise ServiceUnavailable(f"{what}: {type(error).__name__}: {error}") from error
    except redis.exceptions.ResponseError as error:
        # The message quotes the command, and with it what the trace says.
        said = "Redis is full, its maxmemory is reached" if is_full(error) else type(error).__name__
        raise ServiceUnavailable(f"{what}: {said}") from None
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(f"{what}: {type(error).__name__}") from None


def _is_from_replica(error: redis.exceptions.ResponseError) -> bool:
    """Whether Redis refused to write, or to let a client wait any longer, because it is no primary any more."""
    said = str(error)
    # Redis 7 names the error; 6.2 quotes it within that of the script. What waits at an empty queue is unblocked.
    return isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY " in said or said.startswith("UNBLOCKED ")


def is_full(error: redis.exceptions.ResponseError) -> bool:
    """Whether Redis refused a command because its memory limit is reached."""
    # Redis 7 names the error; 6.2 quotes it within that of the script.
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM " in str(error)
