"""One way to connect to Redis, and one error for whatever goes wrong there."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from kp_scorer.errors import ServiceUnavailable, SettingsError
from kp_scorer.settings import RedisSettings

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
    except redis.exceptions.ResponseError as error:
        # The message quotes the command, and with it what the trace says.
        said = "Redis is full, its maxmemory is reached" if is_full(error) else type(error).__name__
        raise ServiceUnavailable(f"{what}: {said}") from None
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(f"{what}: {type(error).__name__}") from None


def is_full(error: redis.exceptions.ResponseError) -> bool:
    """Whether Redis refused a command because its memory limit is reached."""
    # Redis 7 names the error; 6.2 quotes it within that of the script.
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM " in str(error)
