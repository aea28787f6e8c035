"""Kombu's channel and transport on queues of our own, which deliver at least once.

The channel of kombu 5.7.0 pops a message with BRPOP and notes it as unacknowledged in a second step: a consumer that ends
between the two loses it (celery/kombu#305, celery/celery#4354). It also ends its process on an item that is no message.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from queue import Empty
from types import MappingProxyType
from typing import Any, Final

import redis.exceptions
import structlog
from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.json import dumps

from kp_scorer.broker.publishing import Outgoing
from kp_scorer.broker.redis_transport import queue as redis_queue
from kp_scorer.broker.redis_transport.queue import QueueKeys, ReceivedMessage, Sizes
from kp_scorer.broker.wire import DELIVERY_COUNT, ListItem, leave_packed, open_item
from kp_scorer.store.connection import is_full, leave_replicas, primary_pool
from kp_scorer.store.decision_stream import Published, Room

_RECLAIM_EVERY_S: Final = 1.0
_BACKOFF_WHEN_FULL_S: Final = 1.0
_RECEIVED_AT_ONCE: Final = 32
_RECEIVED_BYTES: Final = 1_048_576  # Of messages before the last one: all are in memory at once, several times over.
_RECLAIMED_AT_ONCE: Final = 1_000

log = structlog.get_logger("kp_scorer.broker.redis_transport")


class QoS(kombu_redis.QoS):  # type: ignore[misc]  # kombu ships no types
    """The messages that this channel has in flight: it acknowledges, requeues and reclaims them.

    A delivery tag is ``digest@number@queue``; the number tells copies of a message apart.
    """

    append = virtual.QoS.append  # Redis has noted a message as it was received.

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
        digests: dict[str, list[str]] = {}
        for digest, queue in map(_parts, delivery_tags):
            digests.setdefault(queue, []).append(digest)
        with self._forgetting(*delivery_tags) as client:
            for queue, of_queue in digests.items():
                redis_queue.acknowledge(client, keys=QueueKeys(queue), digests=of_queue)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Requeue a message, to be received last, or acknowledge it."""
        if requeue:
            with self._forgetting(delivery_tag) as client:
                self.restore_by_tag(delivery_tag, client, leftmost=True)
        else:
            self.ack(delivery_tag)

    @contextmanager
    def _forgetting(self, *delivery_tags: str) -> Iterator[Any]:
        """Have messages no longer in flight, whether Redis can be reached or not: else they would be renewed for ever."""
        try:
            with self.channel.conn_or_acquire() as client:
                yield client
        finally:
            for delivery_tag in delivery_tags:
                virtual.QoS.ack(self, delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        """Requeue all that is in flight, as the channel closes."""
        # Over a connection that was lost nothing can be requeued: what is not renewed is reclaimed.
        if self.channel.is_connected:
            super().restore_unacked(client)

    def restore_by_tag(self, tag: str, client: Any = None, leftmost: bool = False) -> None:
        """Requeue a message."""
        digest, queue = _parts(tag)
        with self.channel.conn_or_acquire(client) as connection:
            keys = QueueKeys(queue)
            redis_queue.requeue(connection, keys=keys, digest=digest, receive_next=not leftmost, counts_delivery=True)

    def restore_visible(self, start: int = 0, num: int = 0, interval: int = 0) -> None:
        """Renew what this channel has in flight; reclaim what others have not renewed within the visibility timeout."""
        for queue in self.channel.active_queues:
            self.channel.reclaim(queue)

    def in_flight(self, queue: str) -> list[str]:
        """Digests of what this channel has in flight of a queue."""
        return [digest for digest, of in map(_parts, self._delivered) if of == queue]


def _parts(tag: str) -> tuple[str, str]:
    digest, _, queue = tag.split("@", 2)
    return digest, queue


class Channel(kombu_redis.Channel):  # type: ignore[misc]
    """Receives with scripts where kombu pops and notes. The attributes are set by ``transport_options``."""

    QoS = QoS

    largest_bytes = 2**26  # A larger message does not leave Redis; its beginning does.
    in_flight_bytes = 2**28  # From so many bytes in flight on, no more are received.

    #: Who says where the primary is, if any does, and its name there. Kombu 5.7.0 takes sentinels from the URL, as alternatives
    #: of each other: a connection that tries the second of them forgets its transport, and takes kombu's instead of ours.
    sentinels: Sequence[tuple[str, int]] = ()
    master_name = ""
    sentinel_kwargs: Mapping[str, Any] = MappingProxyType({})

    from_transport_options = (
        *kombu_redis.Channel.from_transport_options,
        *("largest_bytes", "in_flight_bytes", "sentinels", "master_name", "sentinel_kwargs"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._numbers = count()
        self._polled = ""
        self._blocking = False
        self._paused_until = 0.0
        self._reclaimed_at: dict[str, float] = {}
        super().__init__(*args, **kwargs)

    @property
    def is_connected(self) -> bool:
        """Return whether the channel still belongs to a connection that knows its server."""
        return self.connection is not None and self.connection.client is not None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Give a connection to Redis."""
        # A trace may be decided after its connection was lost. There kombu 5.7.0 raises AttributeError, which ends the worker;
        # a ConnectionError does not.
        if client is None and not self.is_connected:
            raise ConnectionError("the connection that the message came by is closed")
        yield client or self._shared_client

    @cached_property
    def _shared_client(self) -> Any:
        # Kombu 5.7.0 makes one for each command, which takes longer than the command.
        return self._create_client()

    def close(self) -> None:
        """Requeue what is in flight, and leave no connection behind."""
        try:
            super().close()
        finally:
            # Kombu 5.7.0 closes connections before it requeues, which opens one anew.
            self._disconnect_pools()

    def _disconnect_pools(self) -> None:
        managers = [pool.sentinel_manager for pool in (self._pool, self._async_pool) if pool is not None and self.sentinels]
        super()._disconnect_pools()
        for manager in managers:
            manager.close()
        # Else it would connect anew through a pool that nobody closes any more.
        self.__dict__.pop("_shared_client", None)

    def _get_pool(self, asynchronous: bool = False) -> Any:
        if self.sentinels:
            self.connection_class = kombu_redis.sentinel.SentinelManagedConnection
            self.connection_class_ssl = kombu_redis.SentinelManagedSSLConnection
            options = self._connparams(asynchronous=asynchronous)
            # They are those of the first sentinel.
            del options["host"], options["port"]
            pool = primary_pool(self.sentinels, self.master_name, self.sentinel_kwargs, **options)
        else:
            pool = super()._get_pool(asynchronous)
        leave_replicas(pool)
        return pool

    def reclaim(self, queue: str) -> None:
        """Renew what this channel has in flight of a queue, and reclaim what dead consumers had, by Redis' clock."""
        with self.conn_or_acquire() as client:
            redis_queue.reclaim(
                client,
                keys=QueueKeys(queue),
                # The lists where kombu puts messages of other priorities.
                priorities=[self._q_for_pri(queue, priority) for priority in self.priority_steps if priority],
                visibility_timeout_ms=int(self.visibility_timeout * 1_000),
                most=_RECLAIMED_AT_ONCE,
                sizes=Sizes(self.largest_bytes),
                in_flight=self.qos.in_flight(queue),
            )

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues or time.monotonic() < self._paused_until:
            return
        self._polled = queues[0]
        connection = self.client.connection
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()
        # Only an empty queue is worth waiting at; a busy one delivers its next messages, noted, in this one round trip.
        if self._blocking:
            keys = QueueKeys(self._polled)
            connection.send_command("BLMOVE", keys.queue, keys.moving, "RIGHT", "LEFT", timeout or self.brpop_timeout)
        else:
            connection.send_command(*self._receive_command(self._polled, self._most()))

    def _brpop_read(self, **options: Any) -> bool:
        name = self._polled
        try:
            messages = self._read_messages(name, **options)
        finally:
            self._in_poll = None
            # Between two commands is the one safe moment for a pending re-authentication.
            self._flush_brpop_reauth()
        if not messages:
            self._queue_cycle.rotate(name)
            raise Empty
        if name not in self.active_queues:
            # This channel has ceased to consume: they are received next, as if they had never been.
            with self.conn_or_acquire() as client:
                for digest in [message.digest.decode() for message in reversed(messages)]:
                    redis_queue.requeue(client, keys=QueueKeys(name), digest=digest, receive_next=True, counts_delivery=False)
            raise Empty
        for message in messages:
            self.connection._deliver(self._message(name, message), name)  # noqa: SLF001  # the transport's own
        return True

    def _most(self) -> int:
        """Return how many more messages this channel may have in flight."""
        if not self.active_queues:
            return 1
        estimate = self.qos.can_consume_max_estimate()
        return _RECEIVED_AT_ONCE if estimate is None else max(1, min(estimate, _RECEIVED_AT_ONCE))

    def _receive_command(self, queue: str, most: int, moved: bytes = b"") -> tuple[Any, ...]:
        """The command that receives the next messages, ``most`` of them at most; the first is one ``moved`` already, if any."""
        keys, sizes = QueueKeys(queue), Sizes(self.largest_bytes)
        return redis_queue.receive.command(keys=keys, moved=moved, most=most, most_bytes=_RECEIVED_BYTES, sizes=sizes)

    def _read_messages(self, queue: str, **options: Any) -> Sequence[ReceivedMessage]:
        connection = self.client.connection
        try:
            reply = self.client.parse_response(connection, "BLMOVE" if self._blocking else "EVALSHA", **options)
        except self.connection_errors:
            # Disconnected, the next tick connects anew.
            connection.disconnect()
            raise
        except redis.exceptions.NoScriptError:
            # Redis is new, or has restarted; the next tick receives.
            with self.conn_or_acquire() as client:
                redis_queue.receive.load(client)
            return []
        except redis.exceptions.ResponseError as error:
            if not is_full(error):
                raise
            # Redis when full lets no one wait at an empty queue, but what comes to it can be received all the same.
            log.warning("broker_full", queue=queue)
            self._paused_until = time.monotonic() + _BACKOFF_WHEN_FULL_S
            self._blocking = False
            return []
        messages: Sequence[ReceivedMessage] = []
        if not self._blocking:
            messages = redis_queue.receive.parse(reply)
        elif reply and len(reply) > self.largest_bytes:
            # Not sent once more: where it lies, it is reclaimed.
            self.reclaim(queue)
        elif reply:
            # BLMOVE has moved it, and not noted it; what has come behind it is received, too.
            messages = self._receive(queue, self._most(), reply)
        self._blocking = not messages
        return messages

    def _receive(self, queue: str, most: int, moved: bytes = b"") -> Sequence[ReceivedMessage]:
        with self.conn_or_acquire() as client:
            return redis_queue.receive.run(client, self._receive_command(queue, most, moved))

    def _get(self, queue: str) -> dict[str, Any]:
        if time.monotonic() - self._reclaimed_at.get(queue, 0.0) > _RECLAIM_EVERY_S:
            self._reclaimed_at[queue] = time.monotonic()
            self.reclaim(queue)
        messages = self._receive(queue, 1)
        if not messages:
            raise Empty
        return self._message(queue, messages[0])

    def _message(self, queue: str, received: ReceivedMessage) -> dict[str, Any]:
        """Make the message that kombu expects: of an item the body, its type and the headers; of one that is no message itself.

        What else kombu reads, such as how a body is packed and where a message came from, is not its producer's to choose.
        """
        try:
            content_type, headers, body, parsed = open_item(received.message)
        except Exception:
            # One of the many things that no message is.
            content_type, headers, body, parsed = ListItem("application/octet-stream", {}, received.message)
        leave_packed(headers)
        # As RabbitMQ counts: deliveries before this one.
        headers[DELIVERY_COUNT] = received.deliveries - 1
        delivery_info = {"exchange": "", "routing_key": queue, "redelivered": received.deliveries > 1}
        # Copies are one message to Redis, but each counts against what a consumer may have in flight.
        tag = f"{received.digest.decode()}@{next(self._numbers)}@{queue}"
        properties = {"delivery_tag": tag, "delivery_info": delivery_info, **parsed}
        return {"body": body, "content-type": content_type, "headers": headers, "properties": properties}

    def publish_all(self, queue: str, messages: Sequence[Outgoing]) -> None:
        """Put messages on a queue, in one step: all of them or, after an error, as when Redis is full, none."""
        items = [self._envelope(queue, *message) for message in messages]
        with self.conn_or_acquire() as client:
            client.lpush(queue, *items)

    def publish_within(self, queue: str, messages: Sequence[Outgoing], room: Room) -> Published:
        """Put messages on a queue in one step, even if Redis is full, as many as there is room for."""
        items = [self._envelope(queue, *message) for message in messages]
        with self.conn_or_acquire() as client:
            return redis_queue.publish(client, keys=QueueKeys(queue), room=room, messages=items)

    def _envelope(self, queue: str, body: bytes, message_id: str, headers: Mapping[str, Any]) -> str:
        properties = {"message_id": message_id, "delivery_mode": 2}
        message = self.prepare_message(body, None, "application/json", "utf-8", dict(headers), properties)
        self._inplace_augment_message(message, "", queue)
        return str(dumps(message))

    def _size(self, queue: str) -> int:
        # Kombu 5.7.0 asks in a transaction, which Redis refuses while it is full: then no one could even connect to read.
        with self.conn_or_acquire() as client:
            return sum(client.llen(self._q_for_pri(queue, priority)) for priority in self.priority_steps)


class Transport(kombu_redis.Transport):  # type: ignore[misc]
    """Redis transport with this module's channel; for the setting ``broker_transport``."""

    Channel = Channel
