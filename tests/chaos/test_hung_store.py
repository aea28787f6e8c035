"""While the store does not answer and the broker does, good and malformed messages wait, and none is lost."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import pytest
from kombu import Connection
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.client import Client
from kp_scorer.store import Store

from tests.support.arena import Arena, BrokerName, endure, put, submit, supervised, traces
from tests.support.fleet import Fleet
from tests.support.processes import PATIENCE_S, wait_until
from tests.support.rabbitmq import evaluated, rabbitmq_in_use
from tests.support.traces import short_traces

pytestmark = pytest.mark.slow

FEW: Final = 10
TIMEOUT_S: Final = 8
LOOK_EVERY_S: Final = 2
OUTAGE_S: Final = {"redis": 5.0, "rabbitmq": 1.5 * TIMEOUT_S}
"""Longer than every timeout, and than RabbitMQ waits before it closes the channel and counts a delivery of its messages."""

_NAMES: Final = {"consumer_timeout": TIMEOUT_S * 1_000, "channel_tick_interval": LOOK_EVERY_S * 1_000}


@pytest.fixture
def impatient_rabbitmq(broker: BrokerName, request: pytest.FixtureRequest) -> Iterator[None]:
    """Have RabbitMQ wait for acknowledgements for seconds, not half an hour, on channels that are opened during the test."""
    if broker == "redis":
        yield
        return
    request.getfixturevalue("rabbitmq_url")
    before = {name: evaluated(f"application:get_env(rabbit, {name}).") for name in _NAMES}
    if not all(before.values()):
        pytest.skip("nobody here may change RabbitMQ's consumer_timeout: run the tests as root")
    with rabbitmq_in_use(alone=True):
        try:
            for name, value in _NAMES.items():
                assert evaluated(f"application:set_env(rabbit, {name}, {value}).") == "ok"
            yield
        finally:
            for name, answer in before.items():
                # The answer is an Erlang term, such as {ok, 1800000}.
                evaluated(f"{{ok, Before}} = {answer}, application:set_env(rabbit, {name}, Before).")


@pytest.mark.usefixtures("impatient_rabbitmq")
def test_messages_wait_for_the_store_beside_the_connection_and_use_up_no_deliveries(arena: Arena) -> None:
    # Workers reach the broker without the proxy, even if broker and store are the same Redis.
    settings = arena.settings(redis__url=arena.store_proxy.url)
    with supervised(settings, arena.directory, 2, lambda *_: {"CONSTANTS": "BrokerSettings.hold_s=2"}) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        bodies, submitted = send_good_and_malformed(arena)
        # This caller waits for a result, and must not get one before the store answers again.
        (asked,) = short_traces(1, seed=9)
        with make_celery(arena.settings()) as caller:
            result = caller.send_task(
                "score_trace", args=[asked], queue=settings.queues.first, ignore_result=False, headers={"kept": "as it is"}
            )
            wait_until_all_wait(fleet)
            endure(OUTAGE_S[arena.broker])
            assert not result.ready()
            arena.store_proxy.deliver()
            assert result.get(timeout=PATIENCE_S)["trace_id"] == asked["id"]
        arena.finish(fleet, [*submitted, str(asked["id"])])
        assert fleet.ends == []
        assert fleet.logged("connection_lost") == 0
        assert arena.broker == "redis" or fleet.logged("message_sent_again") >= 2 * (2 * FEW + 1)
    with Store.open(arena.settings()) as store:
        letters = list(store.dead_letters.read())
        stored = sorted((each.reason, each.deliveries, store.dead_letters.payload(each.letter_id)) for each in letters)
    assert stored == sorted(("malformed", 1, body) for body in bodies)


def test_sigterm_while_messages_wait_for_the_store(arena: Arena) -> None:
    with supervised(arena.settings(redis__url=arena.store_proxy.url), arena.directory, 1) as fleet:
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        bodies, submitted = send_good_and_malformed(arena)
        wait_until_all_wait(fleet)
        assert fleet.stop() == [0], fleet[0].text()[-2_000:]
        assert "Traceback" not in fleet[0].text()
    assert fleet.logged("message_waits") == len(bodies)
    arena.store_proxy.deliver()
    wait_until(lambda: arena.waiting() == len(bodies) + len(submitted))
    with supervised(arena.settings(), arena.directory / "second", 1) as fleet:
        arena.finish(fleet, submitted)


@pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True)
def test_a_resent_message_keeps_its_body_and_the_headers_that_count(arena: Arena) -> None:
    settings = arena.settings(redis__url=arena.store_proxy.url)
    queue, variables = settings.queues.first, {"CONSTANTS": "BrokerSettings.hold_s=0.5"}
    with (
        supervised(settings, arena.directory, 1, lambda *_: variables) as fleet,
        Connection(settings.broker.url) as connection,
    ):
        fleet.wait_until_ready()
        arena.store_proxy.hold()
        headers = {"task": "somebody.elses", "id": "1", "ignore_result": False}
        body = ["\u00e4" * 1_000]
        connection.Producer().publish(
            body, routing_key=queue, serializer="json", compression="zlib", headers={**headers, "CC": ["elsewhere"]}
        )
        wait_until(lambda: fleet.logged("message_sent_again") >= 2)
        assert fleet.stop() == [0]
        delivered = wait_until(partial(connection.default_channel.basic_get, queue, no_ack=True))
        message = connection.default_channel.message_to_python(delivered)
        assert message.decode() == body
        assert {name: message.headers[name] for name in headers} == headers
        assert "CC" not in message.headers


def send_good_and_malformed(arena: Arena) -> tuple[list[bytes], list[str]]:
    """Send malformed messages and traces in turn; return the bodies of the messages and the ids of the traces."""
    bodies = [f"hello {number}".encode() for number in range(FEW)]
    submitted: list[str] = []
    with Client(arena.settings()) as client:
        for body, trace in zip(bodies, traces(FEW), strict=True):
            put(arena.settings(), body)
            submitted += submit(client, [trace])
    return bodies, submitted


def wait_until_all_wait(fleet: Fleet) -> None:
    """Wait until each message is in flight in a worker that got no answer from the store."""
    wait_until(lambda: fleet.logged("message_waits") >= FEW and fleet.logged("trace_waits") >= FEW)
