"""A queue in Redis with at-least-once delivery: a message is on the queue or unacknowledged, and never between the two.

Each queue has, beside its list:

    {queue}.moving          list  messages that a blocking receive has moved and not noted yet, for an instant each
    {queue}.unacknowledged  hash  receipt to message: in flight, neither acknowledged nor requeued
    {queue}.renewed         zset  receipt by the time when its consumer was last known to be alive, in ms of Redis' clock
    {queue}.deliveries      hash  SHA-1 of a message that came back, to how often it was delivered; expires after a day without
                                  a delivery
    {queue}.oversized       list  messages too large for a worker to read, whose beginnings went on in their place; expires
                                  30 days after the last. The newest 100, and no more than 64 MiB together, or a quarter of
                                  Redis' maxmemory, unless a single one is larger; the oldest go first

Each delivery has a receipt of its own. The bytes of a message never change when it is requeued, so its SHA-1 tells how often it
has come back. Most messages never do, and are not hashed.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kp_scorer.broker.wire import BEGINNING_BYTES, CUT_MARK
from kp_scorer.store.decision_stream import Published, Room
from kp_scorer.store.keys import KEPT_S, Key, Prefixed
from kp_scorer.store.scripts import nothing, row, rows, script


class ReceivedMessage(NamedTuple):
    """A message as Redis delivers it."""

    message: bytes
    receipt: bytes
    deliveries: int  # The number of deliveries, this one included.


class QueueKeys(Prefixed):
    """The names of a queue's keys, which all workers share."""

    queue = Key("", "list")
    moving = Key(".moving", "list")
    unacknowledged = Key(".unacknowledged", "hash")
    renewed = Key(".renewed", "zset")
    deliveries = Key(".deliveries", "hash")
    oversized = Key(".oversized", "list")

    @property
    def all(self) -> tuple[str, ...]:
        """The names of all these keys."""
        return self.queue, self.moving, self.unacknowledged, self.renewed, self.deliveries, self.oversized


class Sizes(NamedTuple):
    """The sizes that apply to a message that is too large to be read.

    Its beginning is delivered behind a mark, and all of it is kept for a while.
    """

    largest_bytes: int
    beginning_bytes: int = BEGINNING_BYTES
    cut_mark: bytes = CUT_MARK
    oversized_ttl_s: int = KEPT_S


@script(rows(ReceivedMessage))
def receive(*, keys: QueueKeys, most: int, most_bytes: int, call_name: str, sizes: Sizes) -> None:
    """Receive the next messages. ``call_name`` is unique."""


@script(row(Published))
def publish(*, keys: QueueKeys, room: Room, messages: Sequence[str | bytes]) -> None:
    """Append to a queue, in order, as many of these messages as it has room for, even if Redis is full."""


@script(nothing)
def acknowledge(*, keys: QueueKeys, receipts: Sequence[str]) -> None:
    """Acknowledge messages."""


@script(nothing)
def requeue(*, keys: QueueKeys, receipt: str, receive_next: bool, counts_delivery: bool) -> None:
    """Requeue a message, to be received next or last; ``counts_delivery`` if this delivery was an attempt to process it."""


@script(nothing)
def reclaim(
    *, keys: QueueKeys, priorities: Sequence[str], visibility_timeout_ms: int, most: int, sizes: Sizes, in_flight: Sequence[str]
) -> None:
    """Renew the messages ``in_flight``; requeue those that others have not renewed, and those on the lists ``priorities``."""
