"""Connections to Redis, and the one error that stands for all of its failures."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings.server_sections import BrokerSettings, RedisSettings
from kp_scorer.settings.urls import ServerUrl

T = TypeVar("T")

# A command whose connection breaks is retried three times, with backoff. A timeout is not retried: redis-py 8.1.0 repeats each
# connect within each retry, which made 16 timeouts of one.
_RETRY: Final = Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), 3, (redis.exceptions.ConnectionError,))

# Errors with these names concern the server, the user or the password, and never quote the command's arguments.
_NAMED: Final = re.compile(
    r"\b(NOAUTH|WRONGPASS|NOPERM|DENIED|MISCONF|LOADING|BUSY|READONLY|NOREPLICAS|MASTERDOWN|WRONGTYPE)\b.*"
    r"|DB index is out of range",
    re.DOTALL,
)
_OF_SCRIPTS: Final = re.compile("The user executing the script|ACL failure in script")
_QUOTES: Final = re.compile(r"unknown (sub)?command|wrong number of arguments", re.IGNORECASE)
_LONGEST_REFUSAL: Final = 300
_SCANNED_AT_ONCE: Final = 2_000
_OF_CLUSTERS: Final = (redis.exceptions.AskError, redis.exceptions.ClusterError, redis.exceptions.ClusterCrossSlotError)
IS_CLUSTER: Final = "it is a Redis Cluster, which spreads keys that scripts need together: use one primary, with replicas"
REFUSALS: Final = (redis.exceptions.ResponseError, redis.exceptions.AuthenticationError, redis.exceptions.BusyLoadingError)
"""The errors of redis-py for a refusal by Redis."""


def connect(settings: RedisSettings, timeout_s: float) -> redis.Redis:
    """Return a client that returns bytes, bounds every wait and reconnects by itself. It connects on first use."""
    server = settings.server()
    options: dict[str, Any] = {
        "db": server.database,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 25,
        "retry": _RETRY,
        "socket_keepalive": True,
        **tls_options(server),
    }
    if server.sentinels:
        user: dict[str, Any] = {"username": server.user or None, "password": server.password or None, "ssl": server.is_tls}
        client = redis.Redis.from_pool(primary_pool(**sentinel_options(settings, timeout_s), **user, **options))
    else:
        client = redis.Redis.from_url(server.without_parameters(), **options)
    leave_replicas(client.connection_pool)
    renew_credentials(client.connection_pool, settings)
    return client


class RenewedCredentials(redis.CredentialProvider):
    """Reads the user and the password from the URL's file for each connection, as operators may change them at any time."""

    def __init__(self, settings: RedisSettings | BrokerSettings, *, of_sentinels: bool = False) -> None:
        self._settings = settings
        self._of_sentinels = of_sentinels

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the arguments of Redis' AUTH."""
        server = self._settings.server_now()
        owner = server.sentinels if self._of_sentinels and server.sentinels else server
        return (owner.user, owner.password) if owner.user else (owner.password,)


def renew_credentials(pool: redis.ConnectionPool, settings: RedisSettings) -> None:
    """Make new connections of the pool read the credentials again, if they are in a file."""
    if settings.is_renewed:
        kept = {name: value for name, value in pool.connection_kwargs.items() if name not in ("username", "password")}
        pool.connection_kwargs = {**kept, "credential_provider": RenewedCredentials(settings)}


def tls_options(server: ServerUrl) -> dict[str, Any]:
    """Return TLS options for redis-py, kombu's channel and Celery's backend; none if the URL does not ask for TLS."""
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **server.tls_files} if server.is_tls else {}


def sentinel_options(settings: RedisSettings | BrokerSettings, timeout_s: float) -> dict[str, Any]:
    """Return options for :func:`primary_pool` and Celery's backend; none if the URL names no sentinels."""
    # Asking all sentinels takes no longer than ``timeout_s``, which is the limit for a single server.
    server = settings.server()
    if server.sentinels is None:
        return {}
    each_s = timeout_s / len(server.sentinels.addresses)
    credentials: dict[str, Any] = {"username": server.sentinels.user or None, "password": server.sentinels.password or None}
    if settings.is_renewed and server.sentinels.password:
        credentials = {"credential_provider": RenewedCredentials(settings, of_sentinels=True)}
    sentinel_kwargs = {
        **credentials,
        "socket_timeout": each_s,
        "socket_connect_timeout": each_s,
        # Do not ask the same sentinel again, but the next.
        "retry": Retry(NoBackoff(), 0),
        "ssl": server.is_tls,
        **tls_options(server),
    }
    listening = [(host.strip("[]"), port) for host, port in server.sentinels.addresses]
    return {"sentinels": listening, "master_name": server.sentinels.primary, "sentinel_kwargs": sentinel_kwargs}


def leave_replicas(pool: redis.ConnectionPool) -> None:
    """Make new connections of the pool break when their server reports that it has become a replica.

    After a failover they would otherwise lead to the old primary forever (celery#7946).
    """
    pool.connection_class = type("LeavingConnection", (_LeavesReplicas, pool.connection_class), {})


class _LeavesReplicas:
    """A mixin for connections that break when Redis refuses a write or a blocking command because it is no longer a primary."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **kwargs)
        except redis.exceptions.ResponseError as error:
            # Redis 7 names the error, and 6.2 quotes it within the script's error. UNBLOCKED is the error that ends a wait at
            # an empty queue.
            text, is_named = str(error), isinstance(error, redis.exceptions.ReadOnlyError)
            if not (is_named or "READONLY " in text or text.startswith("UNBLOCKED ")):
                raise
            connection.disconnect()
            raise redis.exceptions.ConnectionError("the server has become a replica") from None


def reports_outages(part: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator of classes: public methods raise ServiceUnavailable, which names ``part``, for errors of redis-py."""
    # This includes refusals: they are the fault of the server, not of a trace.

    def decorate(kind: type[T]) -> type[T]:
        for name, method in list(vars(kind).items()):
            if inspect.isfunction(method) and not name.startswith("_"):
                setattr(kind, name, _reporting(part, method))
        return kind

    return decorate


def _reporting(part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def iterate(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _unavailable_if_down(part):
            yield from method(*args, **kwargs)

    return iterate if inspect.isgeneratorfunction(method) else _unavailable_if_down(part)(method)


@contextmanager
def _unavailable_if_down(part: str) -> Iterator[None]:
    try:
        yield
    except REFUSALS as error:
        raise ServiceUnavailable(f"{part}: Redis refuses: {refusal(error)}") from None
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        problem = f"{part}: {type(error).__name__}: {error}".removesuffix(".")
        raise ServiceUnavailable(f"{problem}; is Redis running where redis.url says?") from error
    except redis.exceptions.RedisError as error:
        raise ServiceUnavailable(f"{part}: {type(error).__name__}") from None


def refusal(error: redis.exceptions.RedisError) -> str:
    """Return why Redis refuses: in its own words if they concern the server, else only the kind of error.

    Other errors quote the command, and with it the content of the trace.
    """
    if isinstance(error, redis.exceptions.NoPermissionError) and isinstance(error.__context__, redis.exceptions.NoScriptError):
        return "it has not the scripts of this version, and this user may not load them: start a worker of this version"
    if _OF_SCRIPTS.search(str(error)):
        return "NOPERM a command in a script, which this user may not run: load the users.acl of this version"
    if isinstance(error, _OF_CLUSTERS):
        return IS_CLUSTER
    if is_full(error):
        return "it is full, its maxmemory is reached"
    # redis-py strips the name from some errors and keeps it in an attribute; the error of a script contains it.
    named = _NAMED.search(f"{getattr(error, 'status_code', None) or ''} {error}")
    if named is None or _QUOTES.search(str(error)):
        return type(error).__name__
    return "".join(filter(str.isprintable, named[0]))[:_LONGEST_REFUSAL]


def in_one_trip(client: redis.Redis, commands: Iterable[tuple[Any, ...]], **options: Any) -> list[Any]:
    """Run commands, each a name and its arguments, in one round trip; return their replies as redis-py converts them."""
    pipeline: Any = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(**options)
    return replies


def names_of(client: redis.Redis, pattern: str, kind: str) -> Iterator[str]:
    """Yield the keys of one type whose names match a pattern, in no order; a key may come twice."""
    # Redis looks through the names of all keys, which blocks it for a millisecond or two at a time.
    for key in client.scan_iter(pattern, _SCANNED_AT_ONCE, _type=kind):
        yield key.decode("utf-8", "backslashreplace")


def entries_in(client: redis.Redis, stream: str, at_once: int) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
    """Yield the id and the fields of each entry of a stream, oldest first; read ``at_once`` in a round trip."""
    start = "-"
    while True:
        chunk: Any = client.xrange(stream, start, "+", at_once)
        yield from chunk
        if len(chunk) < at_once:
            return
        start = f"({chunk[-1][0].decode()}"


def is_full(error: redis.exceptions.RedisError) -> bool:
    """Return whether Redis refused a command because its memory limit is reached."""
    # Redis 7 names the error, and 6.2 quotes it within the script's error.
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM " in str(error)


def primary_pool(
    sentinels: Sequence[tuple[str, int]], master_name: str, sentinel_kwargs: Mapping[str, Any], **options: Any
) -> SentinelConnectionPool:
    """Return a pool of connections, with ``options``, to the primary that the sentinels call ``master_name``."""
    ask_for_primary: Any = _Sentinels(sentinels, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]  # redis-py has no types
    return SentinelConnectionPool(master_name, ask_for_primary, **options)  # type: ignore[no-untyped-call]


class _Sentinels(Sentinel):
    """Sentinels that report a missing primary by an error that redis-py does not retry at once.

    A failover takes seconds; redis-py 8.1.0 would try each command four times, and each time ask all sentinels four times.
    """

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            # Keep only the kinds of errors from redis-py's message. It names none if the sentinels answer but know no such
            # primary.
            reasons = ", ".join(dict.fromkeys(re.findall(r"\b[A-Z]\w*Error\b", str(error)))) or "unknown to them"
            message = f"none of {len(self.sentinels)} sentinels says where the primary {service_name!r} is: {reasons}"
            raise redis.exceptions.TimeoutError(message) from None
