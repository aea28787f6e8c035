"""Kombu's channel and transport, on queues of our own that deliver at least once.

The channel of kombu 5.7.0 pops a message with BRPOP and notes it as unacknowledged in a second step: a consumer that ends
between the two loses it (celery/kombu#305, celery/celery#4354). An item that is not a message ends the consumer, too.
"""

import secrets
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
from kombu.utils.json import dumps

from kp_scorer.broker.headers import DELIVERY_COUNT, leave_packed
from kp_scorer.broker.publishing import Outgoing
from kp_scorer.broker.redis_transport import queue as redis_queue
from kp_scorer.broker.redis_transport.qos import QoS
from kp_scorer.broker.redis_transport.queue import QueueKeys, ReceivedMessage, Sizes
from kp_scorer.broker.wire import ListItem, open_item
from kp_scorer.store.connection import is_full, leave_replicas, primary_pool
from kp_scorer.store.decision_stream import Published, Room

_RECLAIM_EVERY_S: Final = 1.0
_BACKOFF_WHEN_FULL_S: Final = 1.0
_RECEIVED_AT_ONCE: Final = 32
# A receive ends with the message that brings it to this many bytes, as all of it is in memory several times over.
_RECEIVED_BYTES: Final = 1_048_576
_RECLAIMED_AT_ONCE: Final = 1_000

log = structlog.get_logger("kp_scorer.broker.redis_transport")


class Channel(kombu_redis.Channel):  # type: ignore[misc]
    """A channel that receives messages by scripts, in one step where kombu takes two.

    ``transport_options`` sets the attributes.
    """

    QoS = QoS

    largest_bytes = 2**26  # A larger message stays in Redis; only its beginning is delivered.
    in_flight_bytes = 2**28  # With this many bytes in flight, no more messages are received.

    #: The sentinels, if any, and their name of the primary. Kombu 5.7.0 takes sentinels from the URL, as alternatives
    #: of each other: a connection that tries the second of them forgets its transport, and takes kombu's instead of ours.
    sentinels: Sequence[tuple[str, int]] = ()
    master_name = ""
    sentinel_kwargs: Mapping[str, Any] = MappingProxyType({})

    from_transport_options = (
        *kombu_redis.Channel.from_transport_options,
        *("largest_bytes", "in_flight_bytes", "sentinels", "master_name", "sentinel_kwargs"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._name = secrets.token_hex(8)
        self._numbers = count()
        self._polled = ""
        self._blocking = False
        self._paused_until = 0.0
        self._reclaimed_at: dict[str, float] = {}
        self._channels: dict[str, Channel] = {}  # The channels of queues beside the first, by consumer tag.
        super().__init__(*args, **kwargs)

    @property
    def is_connected(self) -> bool:
        """True if the channel still belongs to a connection that knows its server."""
        return self.connection is not None and self.connection.client is not None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Yield a connection to Redis."""
        # A trace may be decided after its connection was lost. In that case kombu 5.7.0 raises AttributeError, which ends the
        # worker; a ConnectionError does not.
        if client is None and not self.is_connected:
            raise ConnectionError("the connection that the message came by is closed")
        yield client or self._shared_client

    @cached_property
    def _shared_client(self) -> Any:
        # Share a client: kombu 5.7.0 creates one for each command, which takes longer than the command.
        return self._create_client()

    def close(self) -> None:
        """Requeue what is in flight, and leave no connection open."""
        try:
            super().close()
        finally:
            # Kombu 5.7.0 closes connections before it requeues, which opens a new one.
            self._disconnect_pools()

    def _disconnect_pools(self) -> None:
        managers = [pool.sentinel_manager for pool in (self._pool, self._async_pool) if pool is not None and self.sentinels]
        super()._disconnect_pools()
        for manager in managers:
            manager.close()
        # Drop the client too: otherwise it would reconnect through a pool that nobody closes.
        self.__dict__.pop("_shared_client", None)

    def _get_pool(self, asynchronous: bool = False) -> Any:
        if self.sentinels:
            self.connection_class = kombu_redis.sentinel.SentinelManagedConnection
            self.connection_class_ssl = kombu_redis.SentinelManagedSSLConnection
            options = self._connparams(asynchronous=asynchronous)
            # These are the host and port of the first sentinel, not of the primary.
            del options["host"], options["port"]
            pool = primary_pool(self.sentinels, self.master_name, self.sentinel_kwargs, **options)
        else:
            pool = super()._get_pool(asynchronous)
        leave_replicas(pool)
        return pool

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> Any:
        """Consume a queue; each after the first gets a channel and a connection of its own, with the same limits in flight."""
        # A single connection that waits at an empty queue could not receive from the others.
        if not self._active_queues:
            return super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        channel = self._channels[consumer_tag] = self.connection.create_channel(self.connection)
        channel.basic_qos(0, self.qos.prefetch_count)
        return channel.basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Stop consuming a queue; its messages in flight stay in flight."""
        channel = self._channels.pop(consumer_tag, None)
        return channel.basic_cancel(consumer_tag) if channel else super().basic_cancel(consumer_tag)

    def lists(self, queue: str) -> list[str]:
        """Return the names of a queue's lists: its own, and those in which kombu puts messages of other priorities."""
        return [self._q_for_pri(queue, priority) for priority in self.priority_steps]

    def reclaim(self, queue: str) -> None:
        """Renew this channel's messages in flight from a queue, and reclaim those of dead consumers, by Redis' clock."""
        with self.conn_or_acquire() as client:
            redis_queue.reclaim(
                client,
                keys=QueueKeys(queue),
                priorities=[name for name in self.lists(queue) if name != queue],
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
        # Wait only at an empty queue. A busy queue delivers and notes its next messages in this one round trip.
        if self._blocking:
            keys = QueueKeys(self._polled)
            connection.send_command("BLMOVE", keys.queue, keys.moving, "RIGHT", "LEFT", timeout or self.brpop_timeout)
        else:
            connection.send_command(*self._receive_command(self._polled, self._most()))

    def _brpop_read(self, **options: Any) -> bool:
        name = self._polled
        try:
            messages = self._read_messages(name, **options)
        except self.connection_errors:
            # Kombu 5.7.0 reads once more while it closes. After an error it would leave this channel, and those behind it, open
            # for good, with their timers and their connections.
            if not self._closing:
                raise
            messages = []
        finally:
            self._in_poll = None
            # Re-authenticate now if that is pending, because it is safe only between two commands.
            self._flush_brpop_reauth()
        if not messages:
            self._queue_cycle.rotate(name)
            raise Empty
        if name not in self.active_queues:
            # The channel has stopped consuming, so put the messages back to the front of the queue. The delivery does not
            # count.
            with self.conn_or_acquire() as client:
                for receipt in [message.receipt.decode() for message in reversed(messages)]:
                    redis_queue.requeue(client, keys=QueueKeys(name), receipt=receipt, receive_next=True, counts_delivery=False)
            raise Empty
        for message in messages:
            self.connection._deliver(self._message(name, message), name)  # noqa: SLF001  # the transport's own
        return True

    def _most(self) -> int:
        """Return how many messages this channel may receive at once."""
        if not self.active_queues:
            return 1
        estimate = self.qos.can_consume_max_estimate()
        return _RECEIVED_AT_ONCE if estimate is None else max(1, min(estimate, _RECEIVED_AT_ONCE))

    def _receive_command(self, queue: str, most: int) -> tuple[Any, ...]:
        """Return the command that receives up to ``most`` messages."""
        keys, sizes, call_name = QueueKeys(queue), Sizes(self.largest_bytes), f"{self._name}.{next(self._numbers)}"
        return redis_queue.receive.command(keys=keys, most=most, most_bytes=_RECEIVED_BYTES, call_name=call_name, sizes=sizes)

    def _read_messages(self, queue: str, **options: Any) -> Sequence[ReceivedMessage]:
        connection = self.client.connection
        try:
            reply = self.client.parse_response(connection, "BLMOVE" if self._blocking else "EVALSHA", **options)
        except self.connection_errors:
            # The next tick reconnects.
            connection.disconnect()
            raise
        except redis.exceptions.NoScriptError:
            # Redis is new or has restarted, so load the script. The next tick receives.
            with self.conn_or_acquire() as client:
                redis_queue.receive.load(client)
            return []
        except redis.exceptions.ResponseError as error:
            if not is_full(error):
                raise
            # A full Redis refuses BLMOVE, so do not wait at an empty queue; the script can still receive the messages that
            # arrive.
            log.warning("broker_full", queue=queue)
            self._paused_until = time.monotonic() + _BACKOFF_WHEN_FULL_S
            self._blocking = False
            return []
        messages: Sequence[ReceivedMessage] = []
        if not self._blocking:
            messages = redis_queue.receive.parse(reply)
        elif reply:
            # BLMOVE has moved a message without noting it. Receive it together with those behind it.
            messages = self._receive(queue, self._most())
        self._blocking = not messages
        return messages

    def _receive(self, queue: str, most: int) -> Sequence[ReceivedMessage]:
        with self.conn_or_acquire() as client:
            return redis_queue.receive.run(client, self._receive_command(queue, most))

    def _get(self, queue: str) -> dict[str, Any]:
        if time.monotonic() - self._reclaimed_at.get(queue, 0.0) > _RECLAIM_EVERY_S:
            self._reclaimed_at[queue] = time.monotonic()
            self.reclaim(queue)
        messages = self._receive(queue, 1)
        if not messages:
            raise Empty
        return self._message(queue, messages[0])

    def _message(self, queue: str, received: ReceivedMessage) -> dict[str, Any]:
        """Return the message that kombu expects, made from the body, type and headers in an item.

        An item that is not a message becomes the body. Producers cannot set anything else that kombu reads, such as how a body
        is packed or where a message came from.
        """
        try:
            content_type, headers, body, parsed = open_item(received.message)
        except Exception:
            # The item is not a message, so all of it becomes the body.
            content_type, headers, body, parsed = ListItem("application/octet-stream", {}, received.message)
        leave_packed(headers)
        # RabbitMQ counts in the same way: deliveries before this one.
        headers[DELIVERY_COUNT] = received.deliveries - 1
        delivery_info = {"exchange": "", "routing_key": queue, "redelivered": received.deliveries > 1}
        properties = {"delivery_tag": f"{received.receipt.decode()}@{queue}", "delivery_info": delivery_info, **parsed}
        return {"body": body, "content-type": content_type, "headers": headers, "properties": properties}

    def publish_all(self, queue: str, messages: Sequence[Outgoing]) -> None:
        """Publish messages to a queue in one step: all of them or, if Redis replies with an error such as being full, none."""
        items = [self._envelope(queue, *message) for message in messages]
        with self.conn_or_acquire() as client:
            client.lpush(queue, *items)

    def publish_within(self, queue: str, messages: Sequence[Outgoing], room: Room) -> Published:
        """Publish to a queue as many of these messages as it has room for, in one step, even if Redis is full."""
        items = [self._envelope(queue, *message) for message in messages]
        with self.conn_or_acquire() as client:
            return redis_queue.publish(client, keys=QueueKeys(queue), room=room, messages=items)

    def _envelope(self, queue: str, body: bytes, message_id: str, headers: Mapping[str, Any]) -> str:
        properties = {"message_id": message_id, "delivery_mode": 2}
        message = self.prepare_message(body, None, "application/json", "utf-8", dict(headers), properties)
        self._inplace_augment_message(message, "", queue)
        return str(dumps(message))

    def _size(self, queue: str) -> int:
        # Kombu 5.7.0 counts messages in a transaction, which a full Redis refuses: then no client could even connect to read.
        with self.conn_or_acquire() as client:
            return sum(map(client.llen, self.lists(queue)))


class Transport(kombu_redis.Transport):  # type: ignore[misc]
    """The Redis transport with this module's channel, for the setting ``broker_transport``."""

    Channel = Channel
