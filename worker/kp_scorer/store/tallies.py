"""How many decisions there were of each domain, and what a shadow would have made of them. ``lua/commit.lua`` counts."""

from typing import Any, NamedTuple

import redis

from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys


class Counted(NamedTuple):
    """Decisions, each counted in the step that stored it."""

    domains: dict[str, int]
    """By domain, most first. Under an empty name are those of all domains that came after too many others."""
    comparison: str
    """Stands for the policies that were compared last; empty if there has been no shadow."""
    outcomes: dict[str, dict[str, int]]
    """Those that these policies were compared on: by domain, then by both outcomes, such as ``accepted>rejected``."""


class Tallies:
    """Reads what all workers have counted."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """Read under the prefix of ``keys``."""
        self._client = client
        self._key = keys.tallies

    def read(self) -> Counted:
        """Read all of it, as of one moment.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("tallies"):
            found: Any = self._client.hgetall(self._key)
        domains, outcomes = dict[str, int](), dict[str, dict[str, int]]()
        for kind, domain, count in sorted((*_field(field), value) for field, value in found.items()):
            if kind == "decided":
                domains[domain] = int(count)
            elif ">" in kind:
                outcomes.setdefault(domain, {})[kind] = int(count)
        most_first = sorted(domains, key=lambda domain: -domains[domain])
        return Counted(
            {domain: domains[domain] for domain in most_first},
            found.get(b"comparison", b"").decode(),
            {domain: outcomes[domain] for domain in most_first if domain in outcomes},
        )


def _field(field: bytes) -> tuple[str, str]:
    kind, _, domain = field.decode().partition(" ")
    return kind, domain
