"""Messages are published many at a time, and for each it is known whether it has reached its queue."""

from collections.abc import Iterator

import pytest
from celery import Celery
from kombu import Producer, Queue
from kp_scorer.broker.calls import declare_queues, waiting, with_producer
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import Outgoing, acknowledge_all, publish_all
from kp_scorer.broker.queues import results_queue
from kp_scorer.broker.wire import raw_body
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.settings import Settings

from tests.support.changed_settings import SettingsWith
from tests.support.processes import wait_until
from tests.support.proxy import Proxy
from tests.support.rabbitmq import RabbitMQ

LIMIT = 10


@pytest.fixture
def settings_here(on_broker: SettingsWith) -> Settings:
    return on_broker(queues__results_limit=LIMIT)


@pytest.fixture
def app(settings_here: Settings) -> Iterator[Celery]:
    with make_celery(settings_here) as made:
        yield made


@pytest.fixture
def queue(settings_here: Settings, app: Celery) -> Queue:
    """A declared queue. On RabbitMQ it takes no more messages than its limit, or a few more."""
    results = results_queue(settings_here, "accepted")
    declare_queues(app, [results])
    return results


def numbered(count: int, first: int = 0) -> list[Outgoing]:
    return [Outgoing(b"%d" % number, f"id-{number}") for number in range(first, first + count)]


def receive_all(app: Celery, queue: Queue) -> list[tuple[bytes, str]]:
    """Return the bodies and ids of the messages on a queue, and acknowledge all of them."""

    def receive(producer: Producer) -> list[tuple[bytes, str]]:
        channel = producer.channel
        messages = []
        while (delivered := channel.basic_get(queue.name)) is not None:
            messages.append(channel.message_to_python(delivered))
        acknowledge_all(messages)
        return [(raw_body(message), message.properties.get("message_id", "")) for message in messages]

    return with_producer(app, "test", receive)


def test_messages_arrive_in_order_and_are_acknowledged_together(app: Celery, queue: Queue) -> None:
    assert publish_all(app, "test", queue, numbered(LIMIT)) == [True] * LIMIT
    assert [body for body, _ in receive_all(app, queue)] == [b"%d" % number for number in range(LIMIT)]
    assert receive_all(app, queue) == []
    assert waiting(app, queue) == 0


@pytest.mark.parametrize("broker", ["rabbitmq"])
def test_publish_all_reports_which_messages_are_refused(app: Celery, queue: Queue) -> None:
    assert all(publish_all(app, "test", queue, numbered(LIMIT)))
    # RabbitMQ may accept a few messages beyond the limit before it notices.
    wait_until(lambda: not any(publish_all(app, "test", queue, numbered(3, first=100))))
    before = {body for body, _ in receive_all(app, queue)}
    accepted = publish_all(app, "test", queue, numbered(50 * LIMIT, first=1_000))
    assert not all(accepted)
    numbers = {int(body) for body, _ in receive_all(app, queue)} - {int(body) for body in before}
    assert numbers == {1_000 + place for place, is_accepted in enumerate(accepted) if is_accepted}


@pytest.mark.parametrize("broker", ["rabbitmq"])
def test_publishing_to_no_queue_raises(app: Celery, settings_here: Settings) -> None:
    queue = results_queue(settings_here, "accepted")
    with pytest.raises(ServiceUnavailable, match="NO_ROUTE"):
        publish_all(app, "test", queue, numbered(3))
    assert publish_all(app, "test", queue, numbered(3), if_missing=[queue]) == [True] * 3
    assert waiting(app, queue) == 3


def test_missing_confirms_raise_in_time(rabbitmq: RabbitMQ) -> None:
    with Proxy(rabbitmq.settings().broker.url) as proxy:
        settings = rabbitmq.settings(broker__url=proxy.url, broker__timeout_s=0.5)
        queue = results_queue(settings, "accepted")
        with make_celery(settings) as app:
            declare_queues(app, [queue])
            assert all(publish_all(app, "test", queue, numbered(3)))
            proxy.hold_replies()
            with pytest.raises(ServiceUnavailable):
                publish_all(app, "test", queue, numbered(3))
            proxy.deliver()
            assert all(publish_all(app, "test", queue, numbered(3)))
