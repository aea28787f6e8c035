"""Inspects the condition of a Redis: settings that may lose queues, decisions or the log; used memory; and the clock."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import redis

from kp_scorer.store.connection import IS_CLUSTER, refusal

_OLDEST: Final = (6, 2)
_NEARLY_FULL: Final = 0.8  # Warn early: from 0.9 on, no submission is accepted.
_EVICTS: Final = "it evicts keys when its memory is full"
_FULL: Final = "its memory is"
_CLOCKS_MAY_DIFFER_S: Final = 2.0


def memory_used(info: Mapping[str, Any]) -> float:
    """Return the share of its ``maxmemory`` that Redis uses, by the reply to ``INFO``; 0 without a limit."""
    limit = info.get("maxmemory", 0)
    return bytes_used(info) / limit if limit else 0.0


def bytes_used(info: Mapping[str, Any]) -> int:
    """Return the bytes that Redis uses, by the reply to ``INFO``."""
    # Leave out buffers for a slow disk or a replica: Redis does not count them either when it decides whether it is full.
    return int(info["used_memory"] - info.get("mem_not_counted_for_evict", 0))


class Condition(NamedTuple):
    """The memory and the shortcomings of a Redis; None for figures that this user may not read."""

    memory_used: float | None = None  # The share of its maxmemory; 0 without a limit.
    evicted_keys: int | None = None  # The number of evicted keys since the server started.
    evicts: str = ""  # The shortcoming that makes a full Redis drop keys; empty if it refuses writes instead.
    shortcomings: tuple[str, ...] = ()  # Each puts queues, decisions or the log at risk, and names its remedy.
    bytes_used: int | None = None

    @property
    def others(self) -> tuple[str, ...]:
        """The shortcomings that none of the figures shows."""
        return tuple(each for each in self.shortcomings if not each.startswith((_EVICTS, _FULL)))


def condition_of(client: redis.Redis) -> Condition:
    """Return the condition of a Redis."""
    try:
        asked_at_s = time.time()
        info: Any = client.info()
        found = (*_wrong_clock(info, asked_at_s), *shortcomings(info, is_managed=_is_managed(client)))
    except redis.exceptions.ResponseError as error:
        # This user may not run INFO, but may be able to do everything else.
        return Condition(shortcomings=(f"cannot be looked at: {refusal(error)}",))
    evicts = next((each for each in found if each.startswith(_EVICTS)), "")
    return Condition(memory_used(info), info.get("evicted_keys"), evicts, found, bytes_used(info))


def _wrong_clock(info: Mapping[str, Any], asked_at_s: float) -> Iterator[str]:
    """Yield a shortcoming if the clocks of Redis and of this machine differ too much."""
    # The time of the reply is unknown, so compare with the smallest difference that is possible.
    redis_s = info.get("server_time_usec", asked_at_s * 1e6) / 1e6
    ahead_s = max(redis_s - time.time(), 0.0) or min(redis_s - asked_at_s, 0.0)
    if abs(ahead_s) > _CLOCKS_MAY_DIFFER_S:
        difference = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'}"
        yield f"its clock is {difference} that of this machine: have both set by NTP, or decided_at is off"


def _is_managed(client: redis.Redis) -> bool:
    """Return whether Redis has no ``CONFIG``, which means that a provider manages it."""
    try:
        # Pass command and subcommand as one word, because redis-py 8.1.0 fails to parse the reply for an unknown command.
        reply: Any = client.execute_command("COMMAND INFO", "config")  # type: ignore[no-untyped-call]  # redis-py has no types
    except redis.exceptions.ResponseError:
        # This user may not run COMMAND INFO.
        return False
    return bool(reply == [None])


def shortcomings(info: Mapping[str, Any], *, is_managed: bool = False) -> Iterator[str]:
    """Yield the shortcomings that the reply to ``INFO`` shows; if Redis is managed, only those that its user can mend."""
    if info.get("cluster_enabled"):
        yield IS_CLUSTER
    version = str(info.get("redis_version", ""))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _OLDEST:
        yield f"Redis {version} is too old: install 6.2 or later"
    if info.get("role") == "slave":
        yield "it is a replica and refuses writes: name the primary in the URL"
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"{_EVICTS} ({policy}): set maxmemory-policy noeviction"
    if not info.get("maxmemory") and not is_managed:
        yield "it takes memory without limit until the machine ends it: set maxmemory"
    elif (used := memory_used(info)) >= _NEARLY_FULL:
        yield f"{_FULL} {used:.0%} full: raise maxmemory, or have what is there read and decided"
    clients, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    if most and clients >= _NEARLY_FULL * most:
        yield f"{clients} clients are connected of {most}, and further ones refused: raise maxclients"
    if not info.get("aof_enabled") and not is_managed:
        yield "it loses what it holds when it restarts, but for its last snapshot: set appendonly yes"
    elif info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield "it failed to rewrite its append-only file, which grows until the disk is full: free disk, or see its log"
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield "its last snapshot failed, and with save points it refuses writes: free disk, or see its log"
