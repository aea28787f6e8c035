"""Messages on the Redis broker are in the queue or in hand, never between, and nothing on a list stops its consumer."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.queues import submission_queues
from kp_scorer.broker.redis_transport import Channel
from kp_scorer.settings import Settings, load_settings

from tests.support.processes import wait_until

QUEUE = "traces"
VISIBILITY_S = 3


def impatient(settings: Settings) -> Celery:
    """An app with messages that come back after three seconds."""
    urls = {"broker.url": settings.broker.url, "redis.url": settings.redis.url}
    return make_celery(load_settings({**urls, "broker.visibility_timeout_s": VISIBILITY_S}))


@pytest.fixture
def app(settings: Settings) -> Celery:
    return impatient(settings)


@pytest.fixture
def connection(app: Celery) -> Iterator[Connection]:
    """A connection of the app."""
    with app.connection_for_read() as opened:
        yield opened


@pytest.fixture
def channel(connection: Connection) -> Channel:
    assert isinstance(connection.default_channel, Channel)
    return connection.default_channel


@pytest.fixture
def other(app: Celery) -> Iterator[Channel]:
    """The channel of another consumer."""
    with app.connection_for_read() as opened:
        yield opened.default_channel


def queue_of_traces() -> Queue:
    return submission_queues(load_settings({"broker.url": "redis://localhost"})).traces


def publish(connection: Connection, body: Any) -> None:
    connection.Producer().publish(body, exchange="", routing_key=QUEUE, serializer="json")


def take(channel: Channel) -> Any:
    return queue_of_traces()(channel).get()


def everything(redis_client: redis.Redis) -> list[Any]:
    return [key for key in redis_client.keys("traces*") if key != b"traces.deliveries"]


def test_a_message_is_in_hand_as_soon_as_it_is_off_the_queue(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    (item,) = redis_client.lrange(QUEUE, 0, -1)
    message = take(channel)
    assert message.decode() == {"a": 1}
    assert redis_client.llen(QUEUE) == 0
    assert redis_client.hvals("traces.in_hand") == [item]
    message.ack()
    assert everything(redis_client) == []
    assert not redis_client.exists("traces.deliveries")


def test_a_rejected_message_returns_byte_for_byte_and_counts_its_deliveries(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    before = redis_client.lrange(QUEUE, 0, -1)
    for delivery in (1, 2, 3):
        message = take(channel)
        assert message.headers["x-delivery-count"] == delivery - 1
        assert message.delivery_info["redelivered"] == (delivery > 1)
        message.reject(requeue=True)
        assert redis_client.lrange(QUEUE, 0, -1) == before
        assert everything(redis_client) == [b"traces"]


def test_what_a_dead_consumer_held_comes_back_after_the_visibility_timeout(
    connection: Connection, channel: Channel, other: Channel
) -> None:
    publish(connection, {"a": 1})
    first = take(other)
    assert take(channel) is None
    again = wait_until(lambda: take(channel), 10)
    assert again.body == first.body
    assert again.headers["x-delivery-count"] == 1


def test_what_a_living_consumer_holds_stays_with_it(connection: Connection, other: Channel, redis_client: redis.Redis) -> None:
    publish(connection, {"a": 1})
    taken: list[Any] = []
    with connection.Consumer(queue_of_traces(), on_message=taken.append):
        started = time.monotonic()
        while time.monotonic() - started < 2.5 * VISIBILITY_S:
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.2)
            if taken:
                assert take(other) is None
    assert len(taken) == 1
    taken[0].ack()
    assert everything(redis_client) == []


def test_what_a_consumer_moved_and_did_not_note_comes_back(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    # What a blocking take does, and then its consumer is dead.
    redis_client.blmove(QUEUE, "traces.taking", 1, "RIGHT", "LEFT")
    channel.sweep(QUEUE)
    assert (redis_client.llen("traces.taking"), redis_client.hlen("traces.in_hand")) == (0, 1)
    assert wait_until(lambda: take(channel), 10).decode() == {"a": 1}


def test_noting_after_the_sweep_has_noted_is_the_same_as_noting_once(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, {"a": 1})
    taken: list[Any] = []

    def consume(message: Any) -> None:
        taken.append(message)

    with connection.Consumer(queue_of_traces(), on_message=consume):
        connection.drain_events(timeout=5)
        # The next take found nothing, so a blocking one is under way; its message is swept before it is read.
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)
        publish(connection, {"b": 2})
        wait_until(lambda: redis_client.llen("traces.taking") == 1, 5)
        channel.sweep(QUEUE)
        connection.drain_events(timeout=5)
    assert [message.decode() for message in taken] == [{"a": 1}, {"b": 2}]
    assert taken[1].headers["x-delivery-count"] == 0
    for message in taken:
        message.ack()
    assert everything(redis_client) == []


def test_messages_of_any_priority_are_taken(connection: Connection, channel: Channel) -> None:
    for priority in range(10):
        connection.Producer().publish(priority, exchange="", routing_key=QUEUE, serializer="json", priority=priority)
    channel.sweep(QUEUE)
    bodies = [take(channel).decode() for _ in range(10)]
    assert sorted(bodies) == list(range(10))


@pytest.mark.parametrize(
    "item",
    [
        b"not JSON",
        b"\xff\xfe\x00",
        b"{}",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"properties": null}',
        b'{"properties": {"delivery_info": null}}',
        b'{"properties": {"body_encoding": "rot13"}, "body": "abc"}',
        b'{"properties": {"body_encoding": "base64"}, "body": "a#b"}',
        b'{"properties": {}, "body": {"a": 1}}',
        b"9" * 5_000,
    ],
)
def test_an_item_that_is_no_message_becomes_one_with_its_bytes(
    channel: Channel, redis_client: redis.Redis, item: bytes
) -> None:
    redis_client.lpush(QUEUE, item)
    message = take(channel)
    assert message.body == item or json.loads(item)["body"] == message.body
    message.ack()
    assert everything(redis_client) == []


def test_an_item_over_the_limit_stays_and_its_beginning_goes_on(channel: Channel, redis_client: redis.Redis) -> None:
    item = b'{"properties": {}, "body": "' + b"a" * channel.largest_bytes + b'"}'
    redis_client.lpush(QUEUE, item)
    message = take(channel)
    assert message.body == item[:65_536]
    assert redis_client.lrange("traces.oversized", 0, -1) == [item]
    assert redis_client.ttl("traces.oversized") > 0
    message.reject(requeue=True)
    again = take(channel)
    assert again.body == item[:65_536]
    again.ack()
    assert everything(redis_client) == [b"traces.oversized"]


def test_an_item_over_the_limit_that_was_moved_and_not_noted_is_not_delivered(
    channel: Channel, redis_client: redis.Redis
) -> None:
    item = b"a" * (channel.largest_bytes + 1)
    redis_client.lpush(QUEUE, item)
    redis_client.blmove(QUEUE, "traces.taking", 1, "RIGHT", "LEFT")
    channel.sweep(QUEUE)
    assert redis_client.lrange("traces.oversized", 0, -1) == [item]
    assert take(channel).body == item[:65_536]


@pytest.fixture
def full(connection: Connection, redis_client: redis.Redis) -> Iterator[None]:
    """Three messages on the queue of a Redis that takes no more."""
    for number in range(3):
        publish(connection, number)
    redis_client.config_set("maxmemory", 1)
    yield
    redis_client.config_set("maxmemory", 0)


@pytest.mark.usefixtures("full")
def test_a_full_redis_delivers_and_takes_everything_back(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    first, second = take(channel), take(channel)
    assert redis_client.hlen("traces.in_hand") == 2
    first.ack()
    second.reject(requeue=True)
    assert redis_client.llen(QUEUE) == 2
    taken: list[Any] = []
    with connection.Consumer(queue_of_traces(), on_message=taken.append):
        wait_until(lambda: _drained(connection) and len(taken) == 2, 10)
    assert {message.decode() for message in taken} == {1, 2}


@pytest.mark.usefixtures("full")
def test_a_full_redis_delivers_what_comes_to_a_queue_that_was_seen_empty(
    connection: Connection, redis_client: redis.Redis
) -> None:
    taken: list[Any] = []
    with connection.Consumer(queue_of_traces(), on_message=taken.append):
        wait_until(lambda: _drained(connection) and len(taken) == 3, 10)
        # No one can wait at it now.
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.3)
        taken[0].reject(requeue=True)
        wait_until(lambda: _drained(connection) and len(taken) == 4, 10)


@pytest.mark.usefixtures("full")
def test_a_full_redis_leaves_a_living_consumer_what_it_holds(channel: Channel, other: Channel) -> None:
    held = [take(other) for _ in range(3)]
    started = time.monotonic()
    while time.monotonic() - started < 1.5 * VISIBILITY_S:
        other.sweep(QUEUE)
        assert take(channel) is None
        threading.Event().wait(0.1)
    for message in held:
        message.ack()


@pytest.mark.usefixtures("full")
def test_a_full_redis_takes_decisions_and_no_submissions(connection: Connection, redis_client: redis.Redis) -> None:
    connection.Producer().publish(1, exchange="", routing_key="decisions.accepted", serializer="json")
    assert redis_client.llen("decisions.accepted") == 1
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        publish(connection, 4)


def _drained(connection: Connection) -> bool:
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.1)
    return True


def test_the_clock_of_a_consumer_does_not_matter(
    connection: Connection, channel: Channel, other: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(connection, {"a": 1})
    take(other)
    monkeypatch.setattr(time, "time", lambda: 4_000_000_000.0)
    channel.sweep(QUEUE)
    assert take(channel) is None


@contextmanager
def consuming(channel: Channel, prefetch: int) -> Iterator[tuple[Connection, list[Any]]]:
    """Consume as a worker does, and give the connection to be drained, and what it delivers."""
    came: list[Any] = []
    connection = channel.connection.client
    channel.basic_qos(0, prefetch, False)
    with connection.Consumer([queue_of_traces()], callbacks=[lambda _, message: came.append(message)], channel=channel):
        yield connection, came


def test_what_waits_is_taken_together_as_far_as_the_consumer_may_hold_more(alone: tuple[Settings, redis.Redis]) -> None:
    settings, server = alone
    with impatient(settings) as app, app.connection_for_read() as connection:
        channel = connection.default_channel
        for number in range(10):
            publish(connection, number)
        with consuming(channel, prefetch=7) as (draining, came):
            calls = int(server.info("commandstats").get("cmdstat_eval", {}).get("calls", 0))
            draining.drain_events(timeout=5)
            assert [message.payload for message in came] == list(range(7))
            assert server.llen(QUEUE) == 3
            after = server.info("commandstats")["cmdstat_eval"]["calls"]
            assert int(after) - calls <= 2
            channel.qos.ack_all([message.delivery_tag for message in came])
            assert server.hlen("traces.in_hand") == 0
            draining.drain_events(timeout=5)
            assert [message.payload for message in came[7:]] == [7, 8, 9]


def test_copies_of_the_same_bytes_count_each_against_what_a_consumer_may_hold(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    publish(connection, "copied")
    (item,) = redis_client.lrange(QUEUE, 0, -1)
    redis_client.lpush(QUEUE, *[item] * 19)
    with consuming(channel, prefetch=7) as (draining, came):
        draining.drain_events(timeout=5)
        with suppress(TimeoutError):
            draining.drain_events(timeout=0.3)
        assert (len(came), redis_client.llen(QUEUE)) == (7, 13)
        came[0].ack()
        draining.drain_events(timeout=5)
        assert (len(came), redis_client.llen(QUEUE)) == (8, 12)
        for message in came[1:]:
            message.ack()
        assert redis_client.hlen("traces.in_hand") == 0


def test_no_more_is_taken_at_once_than_memory_should_hold(
    connection: Connection, channel: Channel, redis_client: redis.Redis
) -> None:
    for _ in range(4):
        publish(connection, "x" * 600_000)
    with consuming(channel, prefetch=10) as (draining, came):
        draining.drain_events(timeout=5)
        assert len(came) == 2
        assert redis_client.llen(QUEUE) == 2


def test_a_channel_that_closes_with_messages_in_hand_leaves_no_connection_behind(alone: tuple[Settings, redis.Redis]) -> None:
    settings, server = alone
    before = [client["id"] for client in server.client_list()]
    with impatient(settings) as app, app.connection_for_read() as connection:
        publish(connection, {"a": 1})
        channel = connection.default_channel
        assert take(channel)
        channel.close()
        assert server.llen(QUEUE) == 1
        wait_until(lambda: [client["id"] for client in server.client_list()] == before, 5)


def test_what_is_on_its_way_as_consuming_ends_goes_back_untried_and_in_order(
    connection: Connection, channel: Channel, other: Channel, redis_client: redis.Redis
) -> None:
    with consuming(channel, prefetch=10) as (draining, came), suppress(TimeoutError):
        # The queue is empty, so that the channel waits at it when it ceases to consume.
        draining.drain_events(timeout=0.2)
    for number in range(3):
        publish(connection, number)
    channel.close()
    assert came == []
    assert redis_client.hlen("traces.in_hand") == 0
    found = [take(other) for _ in range(3)]
    assert [message.payload for message in found] == [0, 1, 2]
    assert [message.headers["x-delivery-count"] for message in found] == [0, 0, 0]
