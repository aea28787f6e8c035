"""Decisions of an outcome on a Redis Stream, for consumer groups."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import redis

from kp_scorer.decision import Decision
from kp_scorer.spans.context import NO_CONTEXT, Context
from kp_scorer.store.connection import reports_outages
from kp_scorer.store.scripts import row, script

_READ_AT_ONCE: Final = 16
_Entries = Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]


@dataclass(frozen=True, slots=True)
class Publication:
    """A decision to be published, and what links the spans of whoever reads it to ours."""

    decision: Decision
    context: Context = field(default_factory=lambda: NO_CONTEXT)
    trace: Callable[[], bytes] = bytes  # Makes the JSON of the trace that goes with it; empty if none does.
    trace_bytes: int = 0  # About how many that are.
    published_to: set[str] = field(default_factory=set)  # The queues and streams that have it.

    def body(self) -> bytes:
        """The decision as JSON, with the trace."""
        decision, trace = self.decision.model_dump_json().encode(), self.trace()
        return decision[:-1] + b',"trace":' + trace + b"}" if trace else decision


class Room(NamedTuple):
    """The room for unread decisions on a queue or stream. A ring drops the oldest ones to make room; others accept no more."""

    most: int
    most_bytes: int = 0  # Of its memory in Redis; 0 is no limit.
    is_ring: bool = False


class Published(NamedTuple):
    """The number of decisions that were published, the first ones; of unread ones; of those that a ring dropped unread."""

    published: int
    unread: int
    dropped: int


class _Entry(NamedTuple):
    """The fields of an entry: the mark of its decision, the decision as JSON, and its context for spans, if there is one."""

    trace_id: str
    decided_at: str
    decision: bytes
    traceparent: str = ""
    tracestate: str = ""


def bytes_in(client: redis.Redis, key: str) -> int:
    """Return the bytes of Redis' memory that a list or stream takes, measured as by the scripts that limit them."""
    size_bytes: Any = client.memory_usage(key, samples=2_000)
    return int(size_bytes or 0)


@script(row(Published))
def _publish_decisions(*, stream: str, room: Room, decisions: Sequence[_Entry]) -> None: ...


@reports_outages("results")
class DecisionStream:
    """A stream of decisions, which need not exist yet.

    An entry is unread until every consumer group of the stream has acknowledged it, and always if there is no group. Entries
    that were read make room for new ones. ServiceUnavailable if Redis cannot be reached, or has something else by this name.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.name = name
        self._client = client

    def publish(self, publications: Sequence[Publication], room: Room) -> Published:
        """Publish decisions, in order and in one step, as many as there is room for."""
        entries = [_Entry(each.decision.trace_id, each.decision.mark, each.body(), **each.context) for each in publications]
        return _publish_decisions(self._client, stream=self.name, room=room, decisions=entries)

    def count_unread(self) -> int:
        """Count the unread decisions."""
        return self.publish((), Room(0)).unread

    def used_bytes(self) -> int:
        """Return about how many bytes of memory it takes."""
        return bytes_in(self._client, self.name)

    def reader(self, group: str, idle_ms: int) -> "StreamReader":
        """Return a consumer of a group, which also receives what another has not acknowledged for ``idle_ms``."""
        return StreamReader(self._client, self.name, group, idle_ms)


@reports_outages("results")
class StreamReader:
    """A consumer of a stream, by the name of this host; it makes its group if that is missing."""

    def __init__(self, client: redis.Redis, name: str, group: str, idle_ms: int) -> None:
        self.name = name
        self._client = client
        self._group = group
        self._consumer = socket.gethostname()
        self._idle_ms = idle_ms
        self._after: bytes | str = "0"
        """The last entry that it received, of those that this consumer was given before; then what stands for new ones."""

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield each decision that is there now, as JSON, behind the id of its entry; an empty one if an entry has none."""
        while entries := self._next():
            for entry, fields in entries:
                if fields:
                    yield entry, fields.get(b"decision", b"")
                elif entry:
                    # A ring dropped it, or somebody deleted it. When Redis 6.2 claims such an entry, it does not even name it.
                    self.acknowledge(entry)

    def acknowledge(self, entry: bytes) -> None:
        """Acknowledge an entry for the group."""
        self._client.xack(self.name, self._group, entry)

    def _next(self) -> _Entries:
        entries = self._read()
        if self._after != ">":
            self._after = entries[-1][0] if entries else ">"
            entries = entries or self._read()
        if not entries:
            reply: Any = self._client.xautoclaim(self.name, self._group, self._consumer, self._idle_ms, count=_READ_AT_ONCE)
            entries = reply[1]
        return entries

    def _read(self) -> _Entries:
        try:
            streams: Any = self._client.xreadgroup(self._group, self._consumer, {self.name: self._after}, count=_READ_AT_ONCE)
        except redis.exceptions.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            self._client.xgroup_create(self.name, self._group, id="0", mkstream=True)
            return self._read()
        entries: _Entries = streams[0][1] if streams else []
        return entries
