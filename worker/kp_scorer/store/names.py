"""Looking through the names of all keys in Redis."""

import re
from collections.abc import Iterator

import redis


def hashes_named(client: redis.Redis, start: str, beginning: str = "", *, at_once: int) -> Iterator[str]:
    """Yield what comes after ``start`` in the name of each hash, if it has ``beginning``; in no order, and none twice.

    Redis looks through ``at_once`` names in one step.
    """
    # Redis gives some twice while its table grows or shrinks.
    seen: set[bytes] = set()
    for key in client.scan_iter(f"{_literal(start + beginning)}*", count=at_once, _type="hash"):
        if key not in seen:
            seen.add(key)
            yield key.decode().removeprefix(start)


def _literal(text: str) -> str:
    """A pattern of Redis that a text alone matches."""
    return re.sub(r"[][*?\\]", r"\\\g<0>", text)
