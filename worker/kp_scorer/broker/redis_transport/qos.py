"""Tracks a channel's messages in flight, through kombu's interface; scripts acknowledge, requeue and reclaim them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.transport import virtual

from kp_scorer.broker.redis_transport import queue as redis_queue
from kp_scorer.broker.redis_transport.queue import QueueKeys


class QoS(kombu_redis.QoS):  # type: ignore[misc]  # kombu ships no types
    """This channel's messages in flight: it acknowledges, requeues and reclaims them. A delivery tag is ``receipt@queue``."""

    append = virtual.QoS.append  # The base class's also notes the message in Redis, which the receiving script has done.

    def can_consume(self) -> bool:
        """Return whether there is room for another message, by number and by bytes."""
        self._flush()
        in_flight_bytes = sum(len(message.body) for message in self._delivered.values())
        return bool(super().can_consume()) and in_flight_bytes < self.channel.in_flight_bytes

    def ack(self, delivery_tag: str) -> None:
        """Acknowledge a message."""
        self.ack_all([delivery_tag])

    def ack_all(self, delivery_tags: Sequence[str]) -> None:
        """Acknowledge messages, in one round trip for each queue."""
        receipts: dict[str, list[str]] = {}
        for receipt, queue in map(_parts, delivery_tags):
            receipts.setdefault(queue, []).append(receipt)
        with self._forgetting(*delivery_tags) as client:
            for queue, of_queue in receipts.items():
                redis_queue.acknowledge(client, keys=QueueKeys(queue), receipts=of_queue)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue a message at the end of its queue, or acknowledge it."""
        if requeue:
            with self._forgetting(delivery_tag) as client:
                self.restore_by_tag(delivery_tag, client, leftmost=True)
        else:
            self.ack(delivery_tag)

    @contextmanager
    def _forgetting(self, *delivery_tags: str) -> Iterator[Any]:
        """Drop messages from those in flight even if Redis cannot be reached: otherwise they would be renewed forever."""
        try:
            with self.channel.conn_or_acquire() as client:
                yield client
        finally:
            for delivery_tag in delivery_tags:
                virtual.QoS.ack(self, delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Requeue everything in flight when the channel closes."""
        # Requeueing is impossible on a lost connection. Other workers reclaim the messages, as nobody renews them.
        if self.channel.is_connected:
            super().restore_unacked(client)

    def restore_by_tag(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Requeue a message."""
        receipt, queue = _parts(tag)
        with self.channel.conn_or_acquire(client) as connection:
            keys = QueueKeys(queue)
            redis_queue.requeue(connection, keys=keys, receipt=receipt, receive_next=not leftmost, counts_delivery=True)

    def restore_visible(self, start: int = 0, num: int = 0, interval: int = 0) -> None:
        """Renew this channel's messages in flight; reclaim those that others have not renewed within the visibility timeout."""
        # Kombu 5.7.0 calls this on one channel only, so act for all channels of the connection.
        for channel in self.channel.connection.channels:
            for queue in channel.active_queues:
                channel.reclaim(queue)

    def in_flight(self, queue: str) -> list[str]:
        """Return the receipts of this channel's messages in flight from a queue."""
        return [receipt for receipt, of in map(_parts, self._delivered) if of == queue]


def _parts(tag: str) -> tuple[str, str]:
    receipt, queue = tag.split("@", 1)
    return receipt, queue
