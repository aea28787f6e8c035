"""What a channel has in hand: acknowledged, given back and renewed on queues of our own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.transport import virtual


class QoS(kombu_redis.QoS):  # type: ignore[misc]  # kombu ships no types
    """What this channel has in hand. A delivery tag is ``digest@number@queue``; the number tells copies of a message apart."""

    def append(self, message: Any, delivery_tag: str) -> None:
        """Remember a message; Redis knows since it was taken."""
        virtual.QoS.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        """Let go of a message for good."""
        self.ack_all([delivery_tag])

    def ack_all(self, delivery_tags: Sequence[str]) -> None:
        """Let go of messages for good, in one round trip for each queue."""
        digests: dict[str, list[str]] = {}
        for digest, queue in map(_parts, delivery_tags):
            digests.setdefault(queue, []).append(digest)
        with self._letting_go(*delivery_tags) as client:
            for queue, of_queue in digests.items():
                self.channel.queue(queue).acknowledge(client, of_queue)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Give a message back to be taken last, or let go of it for good."""
        if not requeue:
            self.ack(delivery_tag)
            return
        with self._letting_go(delivery_tag) as client:
            self.restore_by_tag(delivery_tag, client, leftmost=True)

    @contextmanager
    def _letting_go(self, *delivery_tags: str) -> Iterator[Any]:
        """Hold messages no longer, whether Redis can be told or not: else they would be renewed, and count, for ever."""
        try:
            with self.channel.conn_or_acquire() as client:
                yield client
        finally:
            for delivery_tag in delivery_tags:
                virtual.QoS.ack(self, delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Give back all that is in hand, as the channel closes."""
        # Of a connection that was lost there is nothing to give back: what is not renewed comes back by itself.
        if self.channel.is_connected:
            super().restore_unacked(client)

    def restore_by_tag(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Give a message back."""
        digest, queue = _parts(tag)
        with self.channel.conn_or_acquire(client) as connection:
            self.channel.queue(queue).give_back(connection, digest, taken_next=not leftmost)

    def restore_visible(self, start: int = 0, num: int = 0, interval: int = 0) -> None:
        """Renew what this channel holds; give back what others have not renewed within the visibility timeout."""
        for queue in self.channel.active_queues:
            self.channel.sweep(queue)

    def held(self, queue: str) -> list[str]:
        """Digests of what this channel holds of a queue."""
        return [digest for digest, of in map(_parts, self._delivered) if of == queue]


def _parts(tag: str) -> tuple[str, str]:
    digest, _, queue = tag.split("@", 2)
    return digest, queue
