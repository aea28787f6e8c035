"""Messages in flight for longer than RabbitMQ allows."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import pytest
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client

from tests.chaos.test_hung_store import letters_in
from tests.chaos.test_network import endure
from tests.chaos.test_poison import put
from tests.support.arena import Arena, submit, supervised, traces
from tests.support.processes import wait_until
from tests.support.rabbitmq import evaluated, rabbitmq_in_use
from tests.support.traces import short_traces

FEW: Final = 5
TIMEOUT_S: Final = 8
HOLD_S: Final = 2.0
LOOK_EVERY_S: Final = 2
OUTAGE_S: Final = 2.0 * TIMEOUT_S
"""Twice what RabbitMQ takes before it closes the channel and counts a delivery of all that is in flight."""

_NAMES: Final = {"consumer_timeout": TIMEOUT_S * 1_000, "channel_tick_interval": LOOK_EVERY_S * 1_000}


@pytest.fixture
def impatient_rabbitmq(rabbitmq_url: str) -> Iterator[None]:
    """RabbitMQ that waits for seconds where it waits for half an hour; only channels opened meanwhile are concerned."""
    before = {name: evaluated(f"application:get_env(rabbit, {name}).") for name in _NAMES}
    if not all(before.values()):
        pytest.skip("nobody here may change RabbitMQ's consumer_timeout")
    with rabbitmq_in_use(alone=True):
        try:
            for name, value in _NAMES.items():
                assert evaluated(f"application:set_env(rabbit, {name}, {value}).") == "ok"
            yield
        finally:
            for name, answer in before.items():
                # Erlang's {ok, 1800000}.
                evaluated(f"{{ok, Before}} = {answer}, application:set_env(rabbit, {name}, Before).")


@pytest.mark.slow
@pytest.mark.usefixtures("impatient_rabbitmq")
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_messages_in_flight_during_an_outage_use_up_no_deliveries(arena: Arena) -> None:
    settings = arena.settings(redis__url=arena.store_proxy.url, broker__hold_s=HOLD_S, broker__delivery_limit=2)
    with supervised(settings, arena.directory, 1) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        bodies = [f"hello {number}".encode() for number in range(FEW)]
        for body in bodies:
            put(arena, body)
        with Client(arena.settings(broker__delivery_limit=2)) as client:
            submitted = submit(client, traces(FEW))
        # Of a caller who waits for the result, and gets one in the end, not in between.
        (asked,) = short_traces(1, seed=9)
        with make_celery(arena.settings(broker__delivery_limit=2)) as caller:
            result = caller.send_task(
                "score_trace", args=[asked], queue=settings.queues.traces, ignore_result=False, headers={"kept": "as it is"}
            )
            endure(OUTAGE_S)
            assert not result.ready()
            arena.store_proxy.deliver()
            assert result.get(timeout=30)["trace_id"] == asked["id"]
        arena.finish(fleet, [*submitted, str(asked["id"])])
        assert fleet.ends == []
        assert fleet.logged("connection_lost") == 0
        assert fleet.logged("message_sent_again") >= 2 * (2 * FEW + 1)
    assert letters_in(arena) == sorted(("malformed", 1, body) for body in bodies)


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_resent_message_keeps_its_body_and_the_headers_that_count(arena: Arena) -> None:
    settings = arena.settings(redis__url=arena.store_proxy.url, broker__hold_s=0.5)
    queue = settings.queues.traces
    with supervised(settings, arena.directory, 1) as fleet, Connection(settings.broker.url) as connection:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        producer = connection.Producer()
        headers = {"task": "somebody.elses", "id": "1", "ignore_result": False}
        body = ["\u00e4" * 1_000]
        producer.publish(
            body, routing_key=queue, serializer="json", compression="zlib", headers={**headers, "CC": ["elsewhere"]}
        )
        wait_until(lambda: fleet.logged("message_sent_again") >= 2)
        assert fleet.stop() == [0]
        delivered = wait_until(partial(connection.default_channel.basic_get, queue, no_ack=True))
        message = connection.default_channel.message_to_python(delivered)
        assert message.decode() == body
        assert {name: message.headers[name] for name in headers} == headers
        assert "CC" not in message.headers
