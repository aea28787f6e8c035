"""Kombu's channel and transport on queues of our own.

Kombu's own channel pops a message from the list and then notes it as unacknowledged: a consumer that dies between the two takes
the message with it. It also ends its process, message and all, on an item that is no message.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import count
from queue import Empty
from typing import Any, Final

import redis.exceptions
import structlog
from kombu.transport import redis as kombu_redis
from kombu.utils.json import dumps

from kp_scorer.broker.redis_transport.envelope import opened
from kp_scorer.broker.redis_transport.mailbox import only_its_body
from kp_scorer.broker.redis_transport.qos import QoS
from kp_scorer.broker.redis_transport.queue import RedisQueue, Taken
from kp_scorer.broker.task_body import leave_packed
from kp_scorer.broker.task_message import DELIVERY_COUNT
from kp_scorer.store.connection import is_full, leave_replicas, refusal

_SWEEP_EVERY_S: Final = 1.0
_PAUSE_WHEN_FULL_S: Final = 1.0
_TAKEN_AT_ONCE: Final = 32

log = structlog.get_logger("kp_scorer.broker.redis_transport")


class Channel(kombu_redis.Channel):  # type: ignore[misc]
    """Takes with scripts where kombu pops and notes."""

    QoS = QoS

    #: A larger message does not leave Redis; its beginning does. Set by ``transport_options``.
    largest_bytes = 2**26

    #: Queues that take messages when Redis is full too. Set by ``transport_options``.
    always_take: Sequence[str] = ()

    from_transport_options = (*kombu_redis.Channel.from_transport_options, "largest_bytes", "always_take")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._queues: dict[str, RedisQueue] = {}
        self._numbers = count()
        self._polled = ""
        self._blocking = False
        self._paused_until = 0.0
        self._swept_at: dict[str, float] = {}
        super().__init__(*args, **kwargs)

    @property
    def is_connected(self) -> bool:
        """Whether the channel still belongs to a connection that knows its server."""
        return self.connection is not None and self.connection.client is not None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        """Give a connection to Redis."""
        # A trace may be decided after its connection was lost. Kombu fails then with an error that ends the worker, where one
        # that says what is wrong is all in a day's work.
        if client is None and not self.is_connected:
            raise ConnectionError("the connection that the message came by is closed")
        yield client or self._shared_client

    @cached_property
    def _shared_client(self) -> Any:
        # Kombu makes one for each command, which takes longer than the command.
        return self._create_client()

    def close(self) -> None:
        """Give back what is in hand, and leave no connection behind."""
        try:
            super().close()
        finally:
            # Kombu closes connections before it gives back, which opens one anew.
            self._disconnect_pools()

    def _disconnect_pools(self) -> None:
        super()._disconnect_pools()
        # Else it would connect anew through a pool that nobody closes any more.
        self.__dict__.pop("_shared_client", None)

    def _get_pool(self, asynchronous: bool = False) -> Any:
        pool = super()._get_pool(asynchronous)
        leave_replicas(pool)
        return pool

    def queue(self, name: str) -> RedisQueue:
        """The queue of this name."""
        if name not in self._queues:
            self._queues[name] = RedisQueue(name, self.largest_bytes)
        return self._queues[name]

    def sweep(self, queue: str) -> None:
        """Renew what this channel holds of a queue, and give back what dead consumers have left, by Redis' clock."""
        priorities = [self._q_for_pri(queue, priority) for priority in self.priority_steps if priority]
        with self.conn_or_acquire() as client:
            self.queue(queue).sweep(client, int(self.visibility_timeout * 1_000), priorities, self.qos.held(queue))

    def expire(self, queue: str, seconds: int) -> None:
        """Have Redis remove a queue, whatever is in it, unless it is read before."""
        with self.conn_or_acquire() as client:
            client.expire(queue, seconds)

    def maybe_refresh_binding_expiry(self) -> None:
        """Keep the mailbox of remote control known; later, while Redis is full."""
        try:
            super().maybe_refresh_binding_expiry()
        except redis.exceptions.ResponseError as error:
            # Kombu would log a traceback each second.
            if not is_full(error):
                raise

    def _receive_one(self, client: Any) -> Any:
        try:
            return super()._receive_one(client)
        except redis.exceptions.ResponseError as error:
            # Redis lets this user have no such channel, and says so only now. In the consumer's loop it would be an error of
            # the connection, which would be made anew, and refused anew, for ever.
            log.warning("remote_control_unavailable", detail=refusal(error))
            self.active_fanout_queues.clear()
            raise Empty from None

    def _handle_message(self, client: Any, response: Any) -> dict[str, Any]:
        published: dict[str, Any] = super()._handle_message(client, response)
        # Confirmations of a subscription have a number there.
        if isinstance(published["data"], bytes):
            published["data"] = only_its_body(published["data"])
        return published

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues or time.monotonic() < self._paused_until:
            return
        self._polled = queues[0]
        queue = self.queue(queues[0])
        connection = self.client.connection
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()
        # Only an empty queue is worth waiting at; a busy one delivers its next message, noted, in this one round trip.
        if self._blocking:
            connection.send_command("BLMOVE", queue.name, queue.taking, "RIGHT", "LEFT", timeout or self.brpop_timeout)
        else:
            connection.send_command(*queue.take_command(self._most()))

    def _brpop_read(self, **options: Any) -> bool:
        name = self._polled
        try:
            taken = self._read_taken(self.queue(name), **options)
        finally:
            self._in_poll = None
            # Between two commands is the one safe moment for a pending re-authentication.
            self._flush_brpop_reauth()
        if not taken:
            self._queue_cycle.rotate(name)
            raise Empty
        if name not in self.active_queues:
            self._return(name, taken)
            raise Empty
        for each in taken:
            self.connection._deliver(self._message(name, each), name)  # noqa: SLF001  # the transport's own
        return True

    def _return(self, name: str, taken: Sequence[Taken]) -> None:
        """Put back what was on its way as this channel ceased to consume, to be taken next, as if it had never been taken."""
        with self.conn_or_acquire() as client:
            for each in reversed(taken):
                self.queue(name).give_back(client, each.digest.decode(), taken_next=True, tried=False)

    def _most(self) -> int:
        """How many more messages this channel may hold."""
        if not self.active_queues:
            return 1
        estimate = self.qos.can_consume_max_estimate()
        return _TAKEN_AT_ONCE if estimate is None else max(1, min(estimate, _TAKEN_AT_ONCE))

    def _read_taken(self, queue: RedisQueue, **options: Any) -> Sequence[Taken]:
        connection = self.client.connection
        try:
            reply = self.client.parse_response(connection, "BLMOVE" if self._blocking else "EVAL", **options)
        except self.connection_errors:
            # Disconnected, the next tick connects anew.
            connection.disconnect()
            raise
        except redis.exceptions.ResponseError as error:
            if not is_full(error):
                raise
            # Redis when full lets no one wait at an empty queue, but what comes to it can be taken all the same.
            log.warning("broker_full", queue=queue.name)
            self._paused_until = time.monotonic() + _PAUSE_WHEN_FULL_S
            self._blocking = False
            return []
        taken = self._note(queue, reply) if self._blocking else queue.parse_taken(reply)
        self._blocking = not taken
        return taken

    def _note(self, queue: RedisQueue, moved: bytes | None) -> Sequence[Taken]:
        """Note a message that a blocking take has moved, and take what has come behind it."""
        if not moved:
            return []
        if queue.is_oversized(moved):
            # Not sent once more: where it lies, the sweep sees to it.
            self.sweep(queue.name)
            return []
        with self.conn_or_acquire() as client:
            return queue.take(client, self._most(), moved)

    def _get(self, queue: str) -> dict[str, Any]:
        if time.monotonic() - self._swept_at.get(queue, 0.0) > _SWEEP_EVERY_S:
            self._swept_at[queue] = time.monotonic()
            self.sweep(queue)
        with self.conn_or_acquire() as client:
            taken = self.queue(queue).take(client, 1)
        if not taken:
            raise Empty
        return self._message(queue, taken[0])

    def _put(self, queue: str, message: dict[str, Any], **options: Any) -> None:
        if queue not in self.always_take:
            super()._put(queue, message, **options)
            return
        with self.conn_or_acquire() as client:
            self.queue(queue).put(client, [dumps(message)])

    def publish_all(self, queue: str, messages: Sequence[dict[str, Any]]) -> None:
        """Put messages, as :meth:`prepare_message` makes them, on a queue in one step: all of them or, after an error, none."""
        for message in messages:
            self._inplace_augment_message(message, "", queue)
        self.push_all(queue, [dumps(message) for message in messages])

    def push_all(self, queue: str, items: Sequence[str | bytes]) -> None:
        """Put items on a queue as they are, in one step: all of them or, after an error, none."""
        with self.conn_or_acquire() as client:
            if queue in self.always_take:
                self.queue(queue).put(client, items)
            else:
                client.lpush(queue, *items)

    def _size(self, queue: str) -> int:
        # Kombu asks in a transaction, which Redis refuses while it is full: then no one could even connect to read.
        with self.conn_or_acquire() as client:
            return sum(client.llen(self._q_for_pri(queue, priority)) for priority in self.priority_steps)

    def _message(self, queue: str, taken: Taken) -> dict[str, Any]:
        """Make the message that kombu expects: of an item the body, its type and the headers; of one that is no message itself.

        What else kombu reads, such as how a body is packed and where a message came from, is not its producer's to say.
        """
        try:
            content_type, headers, body = opened(taken.message)
        except Exception:
            # One of the many things that no message is.
            content_type, headers, body = "application/octet-stream", {}, taken.message
        leave_packed(headers)
        # As RabbitMQ counts: deliveries before this one.
        headers[DELIVERY_COUNT] = taken.deliveries - 1
        delivery_info = {"exchange": "", "routing_key": queue, "redelivered": taken.deliveries > 1}
        # Copies are one message to Redis, but each counts against what a consumer may hold.
        tag = f"{taken.digest.decode()}@{next(self._numbers)}@{queue}"
        properties = {"delivery_tag": tag, "delivery_info": delivery_info}
        return {"body": body, "content-type": content_type, "headers": headers, "properties": properties}


class Transport(kombu_redis.Transport):  # type: ignore[misc]
    """Redis transport with this module's channel; for the setting ``broker_transport``."""

    Channel = Channel
