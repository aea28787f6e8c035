"""On Redis, a message is always on the queue or in flight, and nothing that is on the queue stops its consumer."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.redis_transport import queue as transport_queue
from kp_scorer.broker.redis_transport.channel import Channel
from kp_scorer.broker.redis_transport.queue import QueueKeys, Sizes
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store.decision_stream import Room

from tests.support.builders import first_queues
from tests.support.changed_settings import with_changed
from tests.support.processes import PATIENCE_S, wait_until

QUEUE = "traces"
PRIORITY = "traces\x06\x163"
VISIBILITY_S = 3


def impatient(settings: Settings) -> Celery:
    """Return an app whose messages come back after three seconds."""
    return make_celery(with_changed(settings, broker__visibility_timeout_s=VISIBILITY_S))


@pytest.fixture
def app(settings: Settings) -> Celery:
    return impatient(settings)


@pytest.fixture
def connection(app: Celery) -> Iterator[Connection]:
    with app.connection_for_read() as opened:
        yield opened


@pytest.fixture
def channel(connection: Connection) -> Channel:
    assert isinstance(connection.default_channel, Channel)
    return connection.default_channel


@pytest.fixture
def another(app: Celery) -> Iterator[Channel]:
    with app.connection_for_read() as opened:
        yield opened.default_channel


def queue_of_traces() -> Queue:
    return first_queues(load_settings({"broker.url": "redis://localhost"})).traces


def publish(connection: Connection, body: Any) -> None:
    connection.Producer().publish(body, exchange="", routing_key=QUEUE, serializer="json")


def receive(channel: Channel) -> Any:
    return queue_of_traces()(channel).get()


def drained(connection: Connection, timeout_s: float) -> bool:
    """Deliver the messages that arrive within this time, if any. Return True, so that a condition can begin with it."""
    with suppress(TimeoutError):
        connection.drain_events(timeout=timeout_s)
    return True


def everything(redis_client: redis.Redis) -> list[Any]:
    return [key for key in redis_client.keys("traces*") if key != b"traces.deliveries"]


def test_a_message_is_in_flight_as_soon_as_it_is_off_the_queue(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    (item,) = redis_client.lrange(QUEUE, 0, -1)
    message = receive(channel)
    assert message.decode() == {"a": 1}
    assert redis_client.llen(QUEUE) == 0
    assert redis_client.hvals("traces.unacknowledged") == [item]
    message.ack()
    assert everything(redis_client) == []
    assert not redis_client.exists("traces.deliveries")


def test_a_rejected_message_returns_byte_for_byte_and_counts_its_deliveries(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    before = redis_client.lrange(QUEUE, 0, -1)
    for delivery in (1, 2, 3):
        message = receive(channel)
        assert message.headers["x-delivery-count"] == delivery - 1
        assert message.delivery_info["redelivered"] == (delivery > 1)
        message.reject(requeue=True)
        assert redis_client.lrange(QUEUE, 0, -1) == before
        assert everything(redis_client) == [b"traces"]


def test_a_dead_consumers_messages_are_redelivered_whether_noted_or_not(
    connection: Connection, channel: Channel, another: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    noted = receive(another)
    publish(connection, {"b": 2})
    # This is the first step of a blocking receive. Its consumer dies before the second.
    redis_client.blmove(QUEUE, "traces.moving", 1, "RIGHT", "LEFT")
    again = {message.body: message for message in (wait_until(lambda: receive(channel)) for _ in range(2))}
    assert not redis_client.exists("traces.moving")
    assert again[noted.body].headers["x-delivery-count"] == 1
    assert sorted(message.decode().popitem() for message in again.values()) == [("a", 1), ("b", 2)]


def test_copies_fail_as_one_message_and_each_is_redelivered(
    connection: Connection, channel: Channel, another: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, "copied")
    (item,) = redis_client.lrange(QUEUE, 0, -1)
    redis_client.lpush(QUEUE, item)
    assert [receive(another).payload, receive(channel).payload] == ["copied", "copied"]
    receipts: Any = redis_client.zrange("traces.renewed", 0, -1)
    redis_client.zadd("traces.renewed", dict.fromkeys(receipts, 0))
    # Simulate that both consumers are dead.
    another.qos.in_flight = channel.qos.in_flight = lambda _: []
    channel.reclaim(QUEUE)
    again = [receive(channel), receive(channel)]
    assert [message.headers["x-delivery-count"] for message in again] == [1, 1]
    for message in again:
        message.ack()
    assert not redis_client.exists("traces.deliveries", "traces.unacknowledged", "traces.renewed", QUEUE)


def test_a_call_that_a_lost_connection_repeats_loses_nothing(redis_client: redis.Redis) -> None:
    keys = QueueKeys(QUEUE)
    redis_client.lpush(QUEUE, "first", "second")
    command = transport_queue.receive.command(keys=keys, most=1, most_bytes=1, call_name="call", sizes=Sizes(2**20))
    received = [transport_queue.receive.run(redis_client, command)[0].message for _ in range(2)]
    assert received == [b"first", b"second"]
    assert sorted(redis_client.hvals(keys.unacknowledged)) == received


REFUSABLE = [
    *("expire", "hdel", "hget", "hmget", "hset", "lindex", "lpush", "lrange", "ltrim", "rpush"),
    *("time", "zadd", "zrangebyscore", "zrem"),
]
"""The commands with which messages are received, requeued and reclaimed."""


@pytest.mark.parametrize("command", REFUSABLE)
def test_no_message_is_lost_or_copied_for_lack_of_a_permission(alone: tuple[Settings, redis.Redis], command: str) -> None:
    settings, client = alone
    client.acl_setuser("worker", enabled=True, nopass=True, keys=["*"], commands=["+@all", f"-{command}"])
    keys, sizes, messages = QueueKeys(QUEUE), Sizes(2**20), [b"%d" % number for number in range(8)]
    client.lpush(QUEUE, *messages[:3])
    client.lpush(keys.moving, *messages[3:5])
    client.lpush(PRIORITY, messages[5])
    client.hset(keys.unacknowledged, mapping={"dead": messages[6], "in-flight": messages[7]})
    now_ms = client.time()[0] * 1_000
    client.zadd(keys.renewed, {"dead": 0, "in-flight": now_ms})
    # The message that has come back once has made the hash of deliveries.
    client.hset(keys.deliveries, "0" * 40, 1)
    with redis.Redis.from_url(settings.broker.url, username="worker", password="any") as worker:
        for attempt in ("first", "second"):
            with suppress(redis.exceptions.ResponseError):
                transport_queue.receive(worker, keys=keys, most=3, most_bytes=2**20, call_name=attempt, sizes=sizes)
            with suppress(redis.exceptions.ResponseError):
                transport_queue.requeue(worker, keys=keys, receipt="in-flight", receive_next=True, counts_delivery=True)
            with suppress(redis.exceptions.ResponseError):
                transport_queue.reclaim(
                    worker,
                    keys=keys,
                    priorities=[PRIORITY],
                    visibility_timeout_ms=100_000,
                    most=10,
                    sizes=sizes,
                    in_flight=[],
                )
    renewed: Any = client.zrange(keys.renewed, 0, -1)
    in_flight = client.hgetall(keys.unacknowledged)
    assert in_flight.keys() <= {*renewed}
    lists = [client.lrange(each, 0, -1) for each in (QUEUE, keys.moving, PRIORITY)]
    assert sorted([*in_flight.values(), *chain.from_iterable(lists)]) == messages


def test_a_message_that_is_swept_before_its_consumer_notes_it_is_delivered_once(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    messages: list[Any] = []
    with connection.Consumer(queue_of_traces(), on_message=messages.append):
        connection.drain_events(timeout=PATIENCE_S)
        # Nothing comes in time, so a blocking receive is under way. Its message is reclaimed before it is read.
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)
        publish(connection, {"b": 2})
        wait_until(lambda: redis_client.llen("traces.moving") == 1)
        channel.reclaim(QUEUE)
        connection.drain_events(timeout=PATIENCE_S)
    assert [message.decode() for message in messages] == [{"a": 1}, {"b": 2}]
    assert messages[1].headers["x-delivery-count"] == 0
    for message in messages:
        message.ack()
    assert everything(redis_client) == []


def test_messages_of_any_priority_are_received(connection: Connection, channel: Channel) -> None:
    for priority in range(10):
        connection.Producer().publish(priority, exchange="", routing_key=QUEUE, serializer="json", priority=priority)
    channel.reclaim(QUEUE)
    bodies = [receive(channel).decode() for _ in range(10)]
    assert sorted(bodies) == list(range(10))


@pytest.fixture
def full(connection: Connection, limit_memory: Callable[[int], object]) -> None:
    """A Redis that takes no more, with three messages on the queue."""
    for number in range(3):
        publish(connection, number)
    limit_memory(1)


@pytest.mark.usefixtures("full")
def test_a_full_redis_delivers_from_a_queue_that_was_empty(connection: Connection) -> None:
    messages: list[Any] = []
    with connection.Consumer(queue_of_traces(), on_message=messages.append):
        wait_until(lambda: drained(connection, 0.1) and len(messages) == 3)
        # In a full Redis, no consumer can wait at the queue.
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.3)
        messages[0].reject(requeue=True)
        wait_until(lambda: drained(connection, 0.1) and len(messages) == 4)


@pytest.mark.usefixtures("full")
def test_a_living_consumer_keeps_its_messages_also_on_a_full_redis(connection: Connection, another: Channel) -> None:
    messages: list[Any] = []
    with connection.Consumer(queue_of_traces(), on_message=messages.append):
        started = time.monotonic()
        while time.monotonic() - started < 1.5 * VISIBILITY_S:
            drained(connection, 0.2)
            assert len(messages) < 3 or receive(another) is None
    assert len(messages) == 3
    for message in messages:
        message.ack()


@contextmanager
def consuming(channel: Channel, prefetch: int) -> Iterator[tuple[Connection, list[Any]]]:
    """Consume as a worker does; yield the connection, which the test drains, and the messages that it delivers."""
    received: list[Any] = []
    connection = channel.connection.client
    channel.basic_qos(0, prefetch, False)
    with connection.Consumer([queue_of_traces()], callbacks=[lambda _, message: received.append(message)], channel=channel):
        yield connection, received


def test_waiting_messages_are_received_together_up_to_the_prefetch(alone: tuple[Settings, redis.Redis]) -> None:
    settings, server = alone
    with impatient(settings) as app, app.connection_for_read() as connection:
        channel = connection.default_channel
        for number in range(10):
            publish(connection, number)
        with consuming(channel, prefetch=7) as (draining, received):
            calls = int(server.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
            draining.drain_events(timeout=PATIENCE_S)
            assert [message.payload for message in received] == list(range(7))
            assert server.llen(QUEUE) == 3
            after = server.info("commandstats")["cmdstat_evalsha"]["calls"]
            # One more call is needed where Redis has not loaded the script yet.
            assert int(after) - calls <= 3
            channel.qos.ack_all([message.delivery_tag for message in received])
            assert server.hlen("traces.unacknowledged") == 0
            draining.drain_events(timeout=PATIENCE_S)
            assert [message.payload for message in received[7:]] == [7, 8, 9]


def test_copies_of_the_same_bytes_each_count_against_the_prefetch(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, "copied")
    (item,) = redis_client.lrange(QUEUE, 0, -1)
    redis_client.lpush(QUEUE, *[item] * 19)
    with consuming(channel, prefetch=7) as (draining, received):
        draining.drain_events(timeout=PATIENCE_S)
        drained(draining, 0.3)
        assert (len(received), redis_client.llen(QUEUE)) == (7, 13)
        received[0].ack()
        draining.drain_events(timeout=PATIENCE_S)
        assert (len(received), redis_client.llen(QUEUE)) == (8, 12)
        for message in received[1:]:
            message.ack()
        assert redis_client.hlen("traces.unacknowledged") == 0


def test_no_more_than_a_mebibyte_is_received_at_once(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    for _ in range(4):
        publish(connection, "x" * 600_000)
    with consuming(channel, prefetch=10) as (draining, received):
        draining.drain_events(timeout=PATIENCE_S)
        assert len(received) == 2
        assert redis_client.llen(QUEUE) == 2


def test_a_channel_that_closes_with_messages_in_flight_leaves_no_connection_behind(alone: tuple[Settings, redis.Redis]) -> None:
    settings, server = alone
    before = [client["id"] for client in server.client_list()]
    with impatient(settings) as app, app.connection_for_read() as connection:
        publish(connection, {"a": 1})
        channel = connection.default_channel
        assert receive(channel)
        channel.close()
        assert server.llen(QUEUE) == 1
        wait_until(lambda: [client["id"] for client in server.client_list()] == before)


def test_messages_on_their_way_as_consuming_ends_are_requeued_untried_and_in_order(
    connection: Connection, channel: Channel, another: Channel, redis_client: redis.Redis
) -> None:
    with consuming(channel, prefetch=10) as (draining, received):
        # The queue is empty, so the channel waits at it when it stops consuming.
        drained(draining, 0.2)
    for number in range(3):
        publish(connection, number)
    channel.close()
    assert received == []
    assert redis_client.hlen("traces.unacknowledged") == 0
    messages = [receive(another) for _ in range(3)]
    assert [message.payload for message in messages] == [0, 1, 2]
    assert [message.headers["x-delivery-count"] for message in messages] == [0, 0, 0]


def test_no_more_is_received_than_the_bytes_in_flight_allow(connection: Connection, channel: Channel) -> None:
    for number in range(6):
        publish(connection, f"{number}" * 400_000)
    channel.in_flight_bytes = 700_000
    with consuming(channel, prefetch=10) as (draining, received):
        draining.drain_events(timeout=PATIENCE_S)
        drained(draining, 0.3)
        assert len(received) == 2
        received[0].ack()
        draining.drain_events(timeout=PATIENCE_S)
        assert len(received) == 4
        for message in received[1:]:
            message.ack()


def test_all_messages_in_flight_of_a_worker_are_published_and_acknowledged_at_once(
    redis_client: redis.Redis,
) -> None:
    received: list[Any] = []
    keys, bodies = QueueKeys(QUEUE), [str(number) for number in range(10_000)]
    transport_queue.publish(redis_client, keys=keys, room=Room(len(bodies)), messages=bodies)
    sizes = Sizes(2**20)
    while chunk := transport_queue.receive(
        redis_client, keys=keys, most=32, most_bytes=2**20, call_name=f"{len(received)}", sizes=sizes
    ):
        received += chunk
    assert [int(item.message) for item in received] == list(range(10_000))
    transport_queue.acknowledge(redis_client, keys=keys, receipts=[item.receipt.decode() for item in received])
    assert redis_client.exists(QUEUE, keys.unacknowledged, keys.renewed) == 0
