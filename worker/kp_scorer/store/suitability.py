"""Whether a Redis is set up for what it is to keep, by what it says of itself."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_OLDEST: Final = (6, 2)
_NEARLY_FULL: Final = 0.8
"""A tenth more, and no submission is taken."""


def memory_used(info: Mapping[str, Any]) -> float:
    """Of the memory that Redis may take, the share that is taken, by the reply to ``INFO``; 0 where it may take all."""
    limit = info.get("maxmemory", 0)
    return float(info["used_memory"] / limit) if limit else 0.0


def nearly_full(used: float) -> str:
    """What to say of a memory of which so large a share is taken; empty while there is room."""
    return (
        f"its memory is {used:.0%} full: raise maxmemory, or have what is there read and decided"
        if used >= _NEARLY_FULL
        else ""
    )


def shortcomings(info: Mapping[str, Any]) -> Iterator[str]:
    """What may lose queues, decisions or the log, each with its remedy, by the reply to ``INFO``."""
    version = str(info.get("redis_version", ""))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < _OLDEST:
        yield f"Redis {version} is too old: install 6.2 or later"
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield f"it throws keys away when its memory is full ({policy}): set maxmemory-policy noeviction"
    if not info.get("maxmemory"):
        yield "it takes memory without limit until the machine ends it: set maxmemory"
    elif said := nearly_full(memory_used(info)):
        yield said
    if not info.get("aof_enabled"):
        yield "it loses what it holds when it restarts, but for its last snapshot: set appendonly yes"
