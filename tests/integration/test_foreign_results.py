"""What is no decision on a results queue: in nobody's way, and in nobody's lap, but kept."""

import pickle
import tracemalloc
from typing import Any

import pytest
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues, with_producer
from kp_scorer.broker.queues import results_queue
from kp_scorer.settings import Settings
from kp_scorer.store import Store

from tests.support.bombs import GZIP, bombs
from tests.support.builders import decision_on
from tests.support.outcomes import published

FOREIGN: list[tuple[bytes, dict[str, Any]]] = [
    (pickle.dumps({"a": "pickle"}), {"content_type": "application/x-python-serialize", "content_encoding": "binary"}),
    (b"\xff\xfe\x00", {"content_type": "application/json", "content_encoding": "utf-8"}),
    (b"[1]", {"content_type": "application/json", "content_encoding": "utf-8"}),
    (b'{"trace_id":"kp:trace:another"}', {"content_type": "application/json", "content_encoding": "utf-8"}),
    *(
        (decision_on("kp:trace:another")[:-1] + b',"more":%s}' % more, {"content_type": "application/json"})
        for more in (b"NaN", b"-Infinity", b"1e999", b"[" * 950 + b"]" * 950)
    ),
    (b"not compressed", {"content_type": "application/json", "headers": {"compression": GZIP}}),
]


@pytest.fixture(params=["redis", "rabbitmq"])
def on_broker(request: pytest.FixtureRequest) -> Settings:
    if request.param == "redis":
        return request.getfixturevalue("settings")  # type: ignore[no-any-return]
    settings: Settings = request.getfixturevalue("rabbitmq").settings()
    return settings


def test_what_is_no_decision_becomes_a_dead_letter_and_decisions_behind_it_are_taken(on_broker: Settings) -> None:
    foreign = [*FOREIGN, (bombs()[GZIP], {"content_type": "application/json", "headers": {"compression": GZIP}})]
    queue = results_queue(on_broker, "accepted")
    with make_celery(on_broker) as app:
        declare_queues(app, [queue])
        for body, properties in [*foreign, (decision_on("kp:trace:one"), {"content_type": "application/json"})]:
            message = {"body": body, "exchange": "", "routing_key": queue.name, **properties}
            with_producer(app, "test", lambda producer, message=message: producer.publish(**message))  # type: ignore[misc]
    tracemalloc.start()
    assert [taken["trace_id"] for taken in published(on_broker)] == ["kp:trace:one"]
    assert tracemalloc.get_traced_memory()[1] < 2**26, "a message was unpacked"
    tracemalloc.stop()
    assert published(on_broker) == []
    with Store.open(on_broker) as store:
        letters = list(store.dead_letters.read())
        assert {store.dead_letters.payload(letter.letter_id) for letter in letters} == {body for body, _ in foreign}
        assert {(letter.reason, letter.detail) for letter in letters} == {
            ("malformed", f"queue {queue.name}: expected a decision")
        }
