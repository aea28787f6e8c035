"""How many decisions there were of each domain, and what a shadow would have made of them. ``lua/commit.lua`` counts."""

from typing import NamedTuple

import redis

from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys


class Counted(NamedTuple):
    """Decisions, each counted in the step that stored it."""

    domains: dict[str, int]
    """By domain, most first. Under an empty name are those of all domains that came after too many others."""
    outcomes: dict[str, dict[str, int]]
    """Those that two policies were compared on: by domain, most first, then by both outcomes, such as ``accepted>rejected``."""


class Tallies:
    """Reads what all workers have counted."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """Read under the prefix of ``keys``."""
        self._client = client
        self._keys = keys

    def read(self, comparison: str = "") -> Counted:
        """Read what was decided, and what came of the policies that ``comparison`` stands for; without any, of none.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        # In this order, so that nothing is compared that is not decided. No transaction, which Redis when full refuses.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.hgetall(self._keys.compared(comparison))
        pipeline.hgetall(self._keys.tallies)
        with unavailable_if_down("tallies"):
            compared, found = map(_counts, pipeline.execute())
        # An earlier version has left other fields there.
        domains = {domain: count for kind, domain, count in found if kind == "decided"}
        outcomes = dict[str, dict[str, int]]()
        for kind, domain, count in compared:
            outcomes.setdefault(domain, {})[kind] = count
        return Counted(
            dict(sorted(domains.items(), key=lambda of_domain: -of_domain[1])),
            dict(sorted(outcomes.items(), key=lambda of_domain: -sum(of_domain[1].values()))),
        )


def _counts(found: dict[bytes, bytes]) -> list[tuple[str, str, int]]:
    """What is counted, its domain and the count, for each field that has a domain."""
    fields = ((*field.decode().partition(" "), value) for field, value in found.items())
    return sorted((kind, domain, int(value)) for kind, blank, domain, value in fields if blank)
