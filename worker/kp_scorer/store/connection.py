"""One way to connect to Redis, and one error for whatever goes wrong there."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, NamedTuple, TypeVar

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings.sections import BrokerSettings, RedisSettings
from kp_scorer.settings.urls import ServerUrl

T = TypeVar("T")

# A command whose connection broke is retried a few times, with backoff; longer patience is the caller's to choose. A timeout is
# not: redis-py 8.1.0 retries each connect of each retry as often again, which made 16 timeouts of one.
_RETRY: Final = Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), 3, (redis.exceptions.ConnectionError,))

# What these say is about the server, the user or the password, never about the command's arguments.
_NAMED: Final = re.compile(
    r"\b(NOAUTH|WRONGPASS|NOPERM|DENIED|MISCONF|LOADING|BUSY|READONLY|NOREPLICAS|MASTERDOWN|WRONGTYPE)\b.*"
    r"|DB index is out of range",
    re.DOTALL,
)
_QUOTES: Final = re.compile(r"unknown (sub)?command|wrong number of arguments", re.IGNORECASE)
_LONGEST_REFUSAL: Final = 300
_OF_CLUSTERS: Final = (redis.exceptions.AskError, redis.exceptions.ClusterError, redis.exceptions.ClusterCrossSlotError)
_IS_CLUSTER: Final = "it is a Redis Cluster, which spreads keys that scripts need together: use one primary, with replicas"
REFUSALS: Final = (redis.exceptions.ResponseError, redis.exceptions.AuthenticationError, redis.exceptions.BusyLoadingError)
"""What redis-py raises where Redis has answered, and says no."""


def connect(settings: RedisSettings, timeout_s: float) -> redis.Redis:
    """Make a client that gives bytes, bounds every wait and reconnects by itself. Connects on first use."""
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
    """User and password as the URL's file has them when a connection is made: operators change them while workers run."""

    def __init__(self, settings: RedisSettings | BrokerSettings, *, of_sentinels: bool = False) -> None:
        self._settings = settings
        self._of_sentinels = of_sentinels

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """The arguments of Redis' AUTH."""
        server = self._settings.server_now()
        owner = server.sentinels if self._of_sentinels and server.sentinels else server
        return (owner.user, owner.password) if owner.user else (owner.password,)


def renew_credentials(pool: redis.ConnectionPool, settings: RedisSettings) -> None:
    """Have connections that the pool makes from now on read the credentials anew, where a file has them."""
    if settings.is_renewed:
        kept = {name: value for name, value in pool.connection_kwargs.items() if name not in ("username", "password")}
        pool.connection_kwargs = {**kept, "credential_provider": RenewedCredentials(settings)}


def tls_options(server: ServerUrl) -> dict[str, Any]:
    """TLS options for redis-py, kombu's channel and Celery's backend; none where the URL does not ask for it."""
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **server.tls_files} if server.is_tls else {}


def sentinel_options(settings: RedisSettings | BrokerSettings, timeout_s: float) -> dict[str, Any]:
    """Options for :func:`primary_pool` and Celery's backend; none where the URL names none.

    All sentinels together may be waited for as long as one server, for ``timeout_s``.
    """
    server = settings.server()
    if server.sentinels is None:
        return {}
    each_s = timeout_s / len(server.sentinels.addresses)
    credentials: dict[str, Any] = {
        "username": server.sentinels.user or None,
        "password": server.sentinels.password or None,
    }
    if settings.is_renewed and server.sentinels.password:
        credentials = {"credential_provider": RenewedCredentials(settings, of_sentinels=True)}
    sentinel_kwargs = {
        **credentials,
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
    """Have connections that the pool makes from now on break when their server says that it has become a replica.

    After a failover they would lead to the old primary for ever (celery#7946).
    """
    pool.connection_class = type("LeavingConnection", (_LeavesReplicas, pool.connection_class), {})


class _LeavesReplicas:
    """A connection that breaks when Redis refuses to write, or to let it wait, because it is no primary any more."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **kwargs)
        except redis.exceptions.ResponseError as error:
            # Redis 7 names the error; 6.2 quotes it within that of the script. What waits at an empty queue is unblocked.
            text, is_named = str(error), isinstance(error, redis.exceptions.ReadOnlyError)
            if not (is_named or "READONLY " in text or text.startswith("UNBLOCKED ")):
                raise
            connection.disconnect()
            raise redis.exceptions.ConnectionError("the server has become a replica") from None


def reports_outages(part: str) -> Callable[[type[T]], type[T]]:
    """Have every public method of a class raise ServiceUnavailable, under the name ``part``, for whatever redis-py raises.

    A server that refuses a command is no fault of the trace either.
    """

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
    """Why Redis refuses, in its own words where they say what to do about the server; else only what kind of error it is.

    Other errors quote the command, and with it what the trace says.
    """
    if isinstance(error, redis.exceptions.NoPermissionError) and isinstance(error.__context__, redis.exceptions.NoScriptError):
        return "it has not the scripts of this version, and this user may not load them: start a worker of this version"
    if isinstance(error, _OF_CLUSTERS):
        return _IS_CLUSTER
    if is_full(error):
        return "it is full, its maxmemory is reached"
    # redis-py takes the name off some errors, and keeps it beside them; a script's error has it within.
    named = _NAMED.search(f"{getattr(error, 'status_code', None) or ''} {error}")
    if named is None or _QUOTES.search(str(error)):
        return type(error).__name__
    return "".join(filter(str.isprintable, named[0]))[:_LONGEST_REFUSAL]


def is_full(error: redis.exceptions.RedisError) -> bool:
    """Whether Redis refused a command because its memory limit is reached."""
    # Redis 7 names the error; 6.2 quotes it within that of the script.
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM " in str(error)


def primary_pool(
    sentinels: Sequence[tuple[str, int]], master_name: str, sentinel_kwargs: Mapping[str, Any], **options: Any
) -> SentinelConnectionPool:
    """Make a pool of connections, with ``options``, to the primary that the sentinels call ``master_name``."""
    asked: Any = _Sentinels(sentinels, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]  # redis-py has no types
    return SentinelConnectionPool(master_name, asked, **options)  # type: ignore[no-untyped-call]


class _Sentinels(Sentinel):
    """Raises an error for a missing primary that is not retried at once.

    A failover takes seconds; redis-py 8.1.0 would try each command four times, and each time ask all sentinels four times.
    """

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            # Of redis-py's message only the kinds of errors: none if the sentinels answer, and have no such primary.
            reasons = ", ".join(dict.fromkeys(re.findall(r"\b[A-Z]\w*Error\b", str(error)))) or "unknown to them"
            message = f"none of {len(self.sentinels)} sentinels says where the primary {service_name!r} is: {reasons}"
            raise redis.exceptions.TimeoutError(message) from None


_OLDEST: Final = (6, 2)
_NEARLY_FULL: Final = 0.8  # A tenth more, and no submission is accepted.
_EVICTS: Final = "it evicts keys when its memory is full"


def memory_used(info: Mapping[str, Any]) -> float:
    """Of the memory that Redis may take, the share that is taken, by the reply to ``INFO``; 0 where it may take all.

    What waits for a slow disk or a replica does not count, as it does not when Redis itself refuses.
    """
    limit = info.get("maxmemory", 0)
    return float((info["used_memory"] - info.get("mem_not_counted_for_evict", 0)) / limit) if limit else 0.0


class Condition(NamedTuple):
    """How a Redis is set up, and what has become of its memory; None for what this user may not ask."""

    memory_used: float | None = None  # The used share of what it may use; 0 without a limit.
    evicted_keys: int | None = None  # Since it started.
    evicts: str = ""  # Why it loses queues and decisions when its memory is full; empty if it refuses to take more instead.
    shortcomings: tuple[str, ...] = ()  # What may lose queues, decisions or the log, each with its remedy.


def condition_of(client: redis.Redis) -> Condition:
    """Ask a Redis for its condition."""
    try:
        info: Any = client.info()
        found = tuple(shortcomings(info, is_managed=_is_managed(client)))
    except redis.exceptions.ResponseError as error:
        # A user that may not ask can do everything else.
        return Condition(shortcomings=(f"cannot be looked at: {refusal(error)}",))
    evicts = next((each for each in found if each.startswith(_EVICTS)), "")
    return Condition(memory_used(info), info.get("evicted_keys"), evicts, found)


def _is_managed(client: redis.Redis) -> bool:
    """Whether Redis has no ``CONFIG``, as where somebody else manages it."""
    try:
        # In one word with its subcommand: redis-py 8.1.0 fails to parse that a command is unknown.
        reply: Any = client.execute_command("COMMAND INFO", "config")  # type: ignore[no-untyped-call]  # redis-py has no types
    except redis.exceptions.ResponseError:
        # This user may not ask.
        return False
    return bool(reply == [None])


def shortcomings(info: Mapping[str, Any], *, is_managed: bool = False) -> Iterator[str]:
    """The same by the reply to ``INFO``; if it is managed, without what only its operators can choose."""
    if info.get("cluster_enabled"):
        yield _IS_CLUSTER
    version = str(info.get("redis_version", ""))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _OLDEST:
        yield f"Redis {version} is too old: install 6.2 or later"
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"{_EVICTS} ({policy}): set maxmemory-policy noeviction"
    if not info.get("maxmemory") and not is_managed:
        yield "it takes memory without limit until the machine ends it: set maxmemory"
    elif (used := memory_used(info)) >= _NEARLY_FULL:
        yield f"its memory is {used:.0%} full: raise maxmemory, or have what is there read and decided"
    if not info.get("aof_enabled") and not is_managed:
        yield "it loses what it holds when it restarts, but for its last snapshot: set appendonly yes"
