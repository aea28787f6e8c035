"""Decisions of an outcome on a Redis Stream, for consumer groups."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from kp_scorer.decision import Decision
from kp_scorer.spans import NO_CONTEXT, TRACEPARENT, TRACESTATE, Context
from kp_scorer.store.connection import unavailable_if_down
from kp_scorer.store.keys import Keys
from kp_scorer.store.scripts import lua_source


class Publication(NamedTuple):
    """A decision that is to be published."""

    decision: Decision
    context: Context = NO_CONTEXT
    """Goes with it, for the spans of whoever reads it to follow."""


class Placed(NamedTuple):
    """What became of decisions that were to be put on a stream."""

    put: int
    """How many are there now, the first ones; for the others there was no room."""
    dropped: int
    """How many others were dropped for them unread."""
    unread: int
    """How many are unread now."""


class DecisionStream:
    """A stream of decisions. Each entry has the fields ``trace_id``, ``decided_at``, which is its mark, and ``decision``, JSON.

    One that has a context for spans also has that one's fields, ``traceparent`` and perhaps ``tracestate``.

    An entry is unread until every consumer group of the stream has acknowledged it, and always if there is no group. What is
    read makes room for what comes.
    """

    def __init__(self, client: redis.Redis, keys: Keys, name: str) -> None:
        """Use the stream ``name``, which need not exist; count under the prefix of ``keys`` what is dropped."""
        self.name = name
        self._keys = keys
        self._put = client.register_script(lua_source(__package__, "acknowledged", "put_decisions"))
        self._unread = client.register_script(lua_source(__package__, "acknowledged", "unread_decisions"))

    def put(self, publications: Sequence[Publication], most: int, *, drop_oldest: bool) -> Placed:
        """Put decisions on the stream, in order and in one step, as long as no more than ``most`` are unread; 0 is no limit.

        Where the oldest make room, all are put, and the oldest that are too many go, read or not.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or has something else by this name.
        """
        parts = [part for each in publications for part in _parts(*each)]
        with unavailable_if_down("results"):
            found: Any = self._put(keys=[self.name, self._keys.dropped], args=[self.name, most, int(drop_oldest), *parts])
        return Placed(*map(int, found))

    def unread(self) -> int:
        """Count the unread decisions.

        Raises:
            ServiceUnavailable: Redis cannot be reached, or has something else by this name.
        """
        with unavailable_if_down("results"):
            found: Any = self._unread(keys=[self.name])
        return int(found)


def _parts(decision: Decision, context: Context) -> tuple[str, ...]:
    """What the script is told of a decision."""
    own = (decision.trace_id, decision.mark, decision.model_dump_json())
    return (*own, context.get(TRACEPARENT, ""), context.get(TRACESTATE, ""))
