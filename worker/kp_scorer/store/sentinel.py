"""Redis behind sentinels: connections that ask them where the primary is, each when it is made."""

import re
from collections.abc import Sequence
from typing import Any

import redis.exceptions
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool


def primary_pool(
    sentinels: Sequence[tuple[str, int]], master_name: str, sentinel_kwargs: dict[str, Any], **options: Any
) -> SentinelConnectionPool:
    """Make a pool of connections to the primary that the sentinels call ``master_name``.

    ``sentinel_kwargs`` are redis-py's options of connections to sentinels, ``options`` those of connections to the primary.
    """
    asked: Any = _Sentinels(sentinels, sentinel_kwargs=sentinel_kwargs)  # type: ignore[no-untyped-call]  # redis-py has no types
    return SentinelConnectionPool(master_name, asked, **options)  # type: ignore[no-untyped-call]


class _Sentinels(Sentinel):
    """Says that there is no primary by an error that nobody takes for a broken connection, which is worth a retry at once.

    A failover takes seconds; each command would be tried four times, and each time all sentinels be asked four times.
    """

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except MasterNotFoundError as error:
            # Of all that redis-py says of each of them, the kinds of errors: none if they answer, and know no such primary.
            reasons = ", ".join(dict.fromkeys(re.findall(r"\b[A-Z]\w*Error\b", str(error)))) or "unknown to them"
            message = f"none of {len(self.sentinels)} sentinels says where the primary {service_name!r} is: {reasons}"
            raise redis.exceptions.TimeoutError(message) from None
