"""A message too large for a worker is kept whole on a list beside the queue, and the size of that list is bounded."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

import pytest
import redis
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.dead_queue import dead_letter, poison
from kp_scorer.broker.redis_transport.channel import Channel
from kp_scorer.broker.wire import BEGINNING_BYTES, arguments_in, largest_message_bytes, submission_in
from kp_scorer.client.decisions import open_results
from kp_scorer.limits import Limits
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.builders import decision_on, minimal_payload

MIB: Final = 2**20
OVERSIZED: Final = "traces.oversized"

Keep = Callable[[Sequence[bytes]], list[bytes]]


@pytest.fixture(params=["received", "reclaimed"])
def keep(request: pytest.FixtureRequest, settings: Settings, redis_client: redis.Redis) -> Any:
    """A function that has a channel receive or reclaim large messages, and returns those that it keeps beside the queue."""
    options = {"largest_bytes": 10}
    with Connection(
        settings.broker.url, transport="kp_scorer.broker.redis_transport.channel:Transport", transport_options=options
    ) as c:
        channel: Channel = c.default_channel

        def keep_all(messages: Sequence[bytes]) -> list[bytes]:
            for message in messages:
                if request.param == "received":
                    redis_client.lpush("traces", message)
                    channel.basic_ack(channel.basic_get("traces").delivery_tag)
                else:
                    redis_client.lpush("traces.moving", message)
                    channel.reclaim("traces")
            payloads: Any = redis_client.lrange(OVERSIZED, 0, -1)
            return list(payloads)

        yield keep_all


@pytest.mark.parametrize("way", ["received", "reclaimed"])
def test_the_beginning_of_a_message_that_was_cut_is_no_submission(
    way: str, settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    limits = Limits(message_bytes=10_000)
    trace = json.dumps(minimal_payload()).encode()
    item = trace + b" " * largest_message_bytes(limits) + b"and something else"
    with make_celery(settings.model_copy(update={"limits": limits})) as app, app.connection_for_read() as connection:
        channel: Channel = connection.default_channel
        redis_client.lpush("traces" if way == "received" else "traces.moving", item)
        if way == "reclaimed":
            channel.reclaim("traces")
        for _ in range(2):
            message = channel.basic_get("traces")
            assert message.body == item[:BEGINNING_BYTES]
            with pytest.raises(ValueError, match="content type"):
                arguments_in(message, limits)
            assert submission_in(message, limits) == item[:BEGINNING_BYTES]
            # The same holds for a redelivered message.
            message.reject(requeue=True)
        message = channel.basic_get("traces")
        # Even as poison, the message is not attributed to any trace.
        assert dead_letter(store.dead_letters, message, poison(message, 5), limits) is None
        message.ack()
    (stored,) = store.dead_letters.read()
    assert stored.trace_id == ""
    assert redis_client.lrange(OVERSIZED, 0, -1) == [item]
    assert set(redis_client.scan_iter("traces*")) == {OVERSIZED.encode()}


def test_the_beginning_of_a_decision_that_was_cut_is_no_decision(
    settings: Settings, store: Store, redis_client: redis.Redis
) -> None:
    limits = Limits(message_bytes=10_000)
    settings = settings.model_copy(update={"limits": limits})
    item = decision_on("kp:trace:1") + b" " * largest_message_bytes(limits) + b"and something else"
    redis_client.lpush(settings.queues.name("accepted"), item)
    with make_celery(settings) as app, open_results(app, settings) as results:
        assert list(results.receive()) == []
    (dead_letter,) = store.dead_letters.read()
    assert store.dead_letters.payload(dead_letter.letter_id) == item[:BEGINNING_BYTES]


def test_the_newest_hundred_are_kept(keep: Keep, redis_client: redis.Redis) -> None:
    messages = [b"message %05d" % number for number in range(103)]
    assert keep(messages) == messages[3:]
    assert redis_client.ttl(OVERSIZED) > 0


def test_oversized_messages_take_at_most_a_quarter_of_maxmemory(keep: Keep, limit_memory: Callable[[int], object]) -> None:
    messages = [bytes([number]) * (6 * MIB) for number in range(2)]
    limit_memory(40 * MIB)
    assert keep(messages) == messages[1:]


# Reclaimed messages are kept by the same function as received ones, so one way is enough.
@pytest.mark.parametrize("keep", ["received"], indirect=True)
def test_no_more_are_kept_than_their_bytes_allow(keep: Keep) -> None:
    messages = [bytes([number]) * (24 * MIB) for number in range(4)]
    assert keep(messages) == messages[2:]
    larger_than_all = b"x" * (65 * MIB)
    assert keep([larger_than_all]) == [larger_than_all], "the newest stays whatever its size"
    assert keep([b"smaller again"]) == [b"smaller again"]
