"""One way to connect to Redis, and one error for whatever goes wrong there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import RedisSettings
from kp_scorer.store.sentinel import primary_pool
from kp_scorer.urls import ServerUrl

# Broken connections are tried again at once a few times; longer patience is the caller's to choose. What did not answer in
# time is not: redis-py tries each connecting of each try as often again, which made 16 timeouts of one.
_RETRIES = 3
_WORTH_A_RETRY = (redis.exceptions.ConnectionError,)


# What these say is about the server, the user or the password, never about the command's arguments.
_NAMED: Final = re.compile(
    r"\b(NOAUTH|WRONGPASS|NOPERM|DENIED|MISCONF|LOADING|BUSY|READONLY|NOREPLICAS|MASTERDOWN|WRONGTYPE)\b.*"
    r"|DB index is out of range",
    re.DOTALL,
)
_QUOTES: Final = re.compile(r"unknown (sub)?command|wrong number of arguments", re.IGNORECASE)
_LONGEST_REFUSAL: Final = 300
REFUSALS: Final = (redis.exceptions.ResponseError, redis.exceptions.AuthenticationError)
"""What redis-py raises where Redis has answered, and says no."""


def connect(settings: RedisSettings) -> redis.Redis:
    """Make a client that gives bytes, bounds every wait and reconnects by itself. Connects on first use."""
    server = settings.server()
    # A socket is never half open.
    of_tcp: dict[str, Any] = {} if server.scheme == "unix" else {"socket_keepalive": True}
    options = {
        "db": server.database,
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "health_check_interval": 25,
        "retry": Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), _RETRIES, _WORTH_A_RETRY),
        **tls_options(server),
        **of_tcp,
    }
    if server.sentinels:
        of_primary = {"username": server.user or None, "password": server.password or None, "ssl": server.is_tls, **options}
        client = redis.Redis.from_pool(primary_pool(**sentinel_options(server, settings.timeout_s), **of_primary))
    else:
        client = redis.Redis.from_url(server.without_parameters(), **options)
    leave_replicas(client.connection_pool)
    return client


def tls_options(server: ServerUrl) -> dict[str, Any]:
    """What redis-py, kombu's channel and Celery's backend are told of TLS; nothing where the URL does not ask for it."""
    if not server.is_tls:
        return {}
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **server.tls_files}


def sentinel_options(server: ServerUrl, timeout_s: float) -> dict[str, Any]:
    """What :func:`primary_pool` and Celery's backend are told of sentinels; nothing where the URL names none.

    All sentinels together may be waited for as long as one server, for ``timeout_s``.
    """
    if server.sentinels is None:
        return {}
    each_s = timeout_s / len(server.sentinels.addresses)
    sentinel_kwargs = {
        "username": server.sentinels.user or None,
        "password": server.sentinels.password or None,
        "socket_timeout": each_s,
        "socket_connect_timeout": each_s,
        # The next one is asked instead.
        "retry": Retry(NoBackoff(), 0),
        "ssl": server.is_tls,
        **tls_options(server),
    }
    listening = [(host.strip("[]"), port) for host, port in server.sentinels.addresses]
    return {"sentinels": listening, "master_name": server.sentinels.primary, "sentinel_kwargs": sentinel_kwargs}


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
    except REFUSALS as error:
        raise ServiceUnavailable(f"{what}: Redis refuses: {refusal(error)}") from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        said = f"{what}: {type(error).__name__}: {error}".removesuffix(".")
        raise ServiceUnavailable(f"{said}; is Redis running where redis.url says?") from error
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(f"{what}: {type(error).__name__}") from None


def refusal(error: redis.exceptions.RedisError) -> str:
    """Why Redis refuses, in its own words where they say what to do about the server; else only what kind of error it is.

    Other errors quote the command, and with it what the trace says.
    """
    if isinstance(error, redis.exceptions.AuthenticationError):
        return str(error)
    if is_full(error):
        return "it is full, its maxmemory is reached"
    # redis-py takes the name off some errors, and keeps it beside them; a script's error has it within.
    said = _NAMED.search(f"{getattr(error, 'status_code', None) or ''} {error}")
    if said is None or _QUOTES.search(str(error)):
        return type(error).__name__
    return "".join(filter(str.isprintable, said[0]))[:_LONGEST_REFUSAL]


def _is_from_replica(error: redis.exceptions.ResponseError) -> bool:
    """Whether Redis refused to write, or to let a client wait any longer, because it is no primary any more."""
    said = str(error)
    # Redis 7 names the error; 6.2 quotes it within that of the script. What waits at an empty queue is unblocked.
    return isinstance(error, redis.exceptions.ReadOnlyError) or "READONLY " in said or said.startswith("UNBLOCKED ")


def is_full(error: redis.exceptions.RedisError) -> bool:
    """Whether Redis refused a command because its memory limit is reached."""
    # Redis 7 names the error; 6.2 quotes it within that of the script.
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM " in str(error)
