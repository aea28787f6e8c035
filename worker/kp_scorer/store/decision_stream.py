"""Decisions of an outcome on a Redis Stream, for consumer groups."""

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import redis

from kp_scorer.decision import Decision
from kp_scorer.spans.context import NO_CONTEXT, Context
from kp_scorer.store.connection import entries_in, reports_outages
from kp_scorer.store.scripts import row, script

_READ_AT_ONCE: Final = 16
_Entries = Sequence[tuple[bytes, Mapping[bytes, bytes] | None]]


@dataclass(frozen=True, slots=True)
class Publication:
    """A decision to be published, and the context that links its readers' spans to ours."""

    decision: Decision
    context: Context = field(default_factory=lambda: NO_CONTEXT)
    trace: Callable[[], bytes] = bytes  # Builds the JSON of the trace that is published with it; empty without one.
    trace_bytes: int = 0  # The approximate length of the JSON of the trace.
    published_to: set[str] = field(default_factory=set)  # The queues and streams that have the decision already.

    def body(self) -> bytes:
        """Return the decision as JSON, with the trace."""
        decision, trace = self.decision.model_dump_json().encode(), self.trace()
        return decision[:-1] + b',"trace":' + trace + b"}" if trace else decision


class Room(NamedTuple):
    """The room for unread decisions on a queue or stream. A ring drops the oldest ones to make room; others accept no more."""

    most: int
    most_bytes: int = 0  # The most bytes of memory in Redis; 0 is no limit.
    is_ring: bool = False


class Published(NamedTuple):
    """The numbers of decisions that were published, that are unread, and that a ring dropped unread.

    The published ones are the first of those given.
    """

    published: int
    unread: int
    dropped: int


class _Entry(NamedTuple):
    """The fields of an entry: the trace's id, the decision's mark, the decision as JSON, and its context for spans, if any."""

    trace_id: str
    decided_at: str
    decision: bytes
    traceparent: str = ""
    tracestate: str = ""


def bytes_in(client: redis.Redis, key: str) -> int:
    """Return the bytes of Redis' memory that a list or stream takes, measured as in the scripts that limit it."""
    size_bytes: Any = client.memory_usage(key, samples=2_000)
    return int(size_bytes or 0)


@script(row(Published))
def _publish_decisions(*, stream: str, room: Room, decisions: Sequence[_Entry]) -> None: ...


@reports_outages("results")
class DecisionStream:
    """A stream of decisions, which need not exist yet.

    An entry is unread until every consumer group of the stream has acknowledged it, and always if there is no group. Entries
    that were read make room for new ones. Raises ServiceUnavailable if Redis cannot be reached, or holds something else by
    this name.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self.name = name
        self._client = client

    def publish(self, publications: Sequence[Publication], room: Room) -> Published:
        """Publish decisions in order and in one step, until there is no more room."""
        entries = [_Entry(each.decision.trace_id, each.decision.mark, each.body(), **each.context) for each in publications]
        return _publish_decisions(self._client, stream=self.name, room=room, decisions=entries)

    def count_unread(self) -> int:
        """Return the number of unread decisions."""
        return self.publish((), Room(0)).unread

    def used_bytes(self) -> int:
        """Return the approximate bytes of memory that the stream takes."""
        return bytes_in(self._client, self.name)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the id of each entry, oldest first, with its decision as JSON, whether it was read or not."""
        for entry, fields in entries_in(self._client, self.name, _READ_AT_ONCE):
            yield entry, fields.get(b"decision", b"")

    def remove(self, entry: bytes) -> None:
        """Remove an entry, so that no group receives it any more."""
        self._client.xdel(self.name, entry)

    def reader(self, group: str, idle_ms: int) -> "StreamReader":
        """Return a consumer of a group; it also receives what other consumers have not acknowledged for ``idle_ms``."""
        return StreamReader(self._client, self.name, group, idle_ms)


@reports_outages("results")
class StreamReader:
    """A consumer of a stream, named after this host. It creates its group if that is missing."""

    def __init__(self, client: redis.Redis, name: str, group: str, idle_ms: int) -> None:
        self.name = name
        self._client = client
        self._group = group
        self._consumer = socket.gethostname()
        self._idle_ms = idle_ms
        self._after: bytes | str = "0"
        """The last entry read of those that this consumer had not acknowledged at its start; then ``>``, for new entries."""

    def receive(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the id of each entry that is there now, with its decision as JSON, which is empty if the entry has none."""
        while entries := self._next():
            for entry, fields in entries:
                if fields:
                    yield entry, fields.get(b"decision", b"")
                elif entry:
                    # A ring or an operator has deleted the entry. When Redis 6.2 claims such an entry, it does not even return
                    # its id.
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
            self._create_group()
            return self._read()
        entries: _Entries = streams[0][1] if streams else []
        return entries

    def _create_group(self) -> None:
        try:
            self._client.xgroup_create(self.name, self._group, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            # Another reader that has started at the same time may have created it meanwhile.
            if "BUSYGROUP" not in str(error):
                raise
