"""What was dropped to make room: one count for each queue of decisions, and one for dead letters."""

from typing import Any

import redis

from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys
from kp_scorer.store.scripts import lua_source


class Drops:
    """Counts drops, of all workers together."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        """Count under the prefix of ``keys``."""
        self._client = client
        self._key = keys.dropped
        self._note = client.register_script(lua_source(__package__, "note_drop"))

    def note(self, queue: str) -> None:
        """Count a decision that is dropped from a queue.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("drops"):
            self._note(keys=[self._key], args=[queue])

    def counts(self) -> dict[str, int]:
        """Give how many decisions were dropped by now, by queue, and how many ``dead letters``; none is not there.

        Raises:
            ServiceUnavailable: Redis cannot be reached.
        """
        with unavailable_if_down("drops"):
            found: Any = self._client.hgetall(self._key)
        return {queue.decode(): int(count) for queue, count in sorted(found.items())}
