"""Decisions of an outcome on a Redis Stream, for consumer groups."""

from collections.abc import Sequence
from typing import NamedTuple

import redis

from kp_scorer.decision import Decision
from kp_scorer.ledger.connection import reports_outages
from kp_scorer.ledger.scripts import row, script
from kp_scorer.spans.context import NO_CONTEXT, TRACEPARENT, TRACESTATE, Context


class Publication(NamedTuple):
    """A decision to be published, and what links the spans of whoever reads it to ours."""

    decision: Decision
    context: Context = NO_CONTEXT


class Published(NamedTuple):
    """How many decisions were published, the first ones, and how many are unread now."""

    published: int
    unread: int


class _Entry(NamedTuple):
    """The fields of an entry: the mark of its decision, the decision as JSON, and its context for spans, if there is one."""

    trace_id: str
    decided_at: str
    decision: str
    traceparent: str
    tracestate: str


@script(row(Published))
def _publish_decisions(*, stream: str, most: int, decisions: Sequence[_Entry]) -> None: ...


@reports_outages("results")
class DecisionStream:
    """A stream of decisions, which need not exist yet.

    An entry is unread until every consumer group of the stream has acknowledged it, and always if there is no group. What is
    read makes room for what comes. ServiceUnavailable if Redis cannot be reached, or has something else by this name.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.name = name
        self._client = client

    def publish(self, publications: Sequence[Publication], most: int) -> Published:
        """Publish decisions, in order and in one step, as long as no more than ``most`` are unread; 0 is no limit."""
        entries = [_entry(*each) for each in publications]
        return _publish_decisions(self._client, stream=self.name, most=most, decisions=entries)

    def count_unread(self) -> int:
        """Count the unread decisions."""
        return self.publish((), 0).unread


def _entry(decision: Decision, context: Context) -> _Entry:
    contexts = context.get(TRACEPARENT, ""), context.get(TRACESTATE, "")
    return _Entry(decision.trace_id, decision.mark, decision.model_dump_json(), *contexts)
