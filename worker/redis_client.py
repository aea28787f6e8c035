"""One way to connect to Redis, and one error for whatever goes wrong there."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from worker.errors import ServiceUnavailable, SettingsError
from worker.settings import RedisSettings

# Broken connections are tried again at once a few times; longer patience is the caller's to choose.
_RETRIES = 3


def connect(settings: RedisSettings) -> redis.Redis:
    """Make a client that gives bytes, bounds every wait and reconnects by itself. Connects on first use.

    Raises:
        SettingsError: the URL is not one that redis-py takes.
    """
    try:
        return redis.Redis.from_url(
            settings.url,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            socket_keepalive=True,
            health_check_interval=25,
            retry=Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), _RETRIES),
        )
    except ValueError as error:
        raise SettingsError(f"redis.url: {error}") from None


@contextmanager
def unavailable_if_down(what: str) -> Iterator[None]:
    """Turn whatever redis-py raises into ServiceUnavailable.

    Not only broken connections: a server that is full, read-only, loading or refuses a command is no fault of the trace.
    """
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise ServiceUnavailable(f"{what}: {type(error).__name__}: {error}") from error
    except redis.exceptions.RedisError as error:
        # Its message quotes the command, and with it what the trace says.
        raise ServiceUnavailable(f"{what}: {type(error).__name__}") from None
