"""The resender sends lost traces again, even through outages and while workers decide them; ``tests/model`` has the rest."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pytest
import redis
from celery import Celery
from kp_scorer.broker.calls import declare_queues, waiting
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import send_traces
from kp_scorer.broker.queues import SubmissionQueues
from kp_scorer.process import submission_resender
from kp_scorer.process.metrics import Metrics
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import LedgerSettings
from kp_scorer.store import Store
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Submission

from tests.support.builders import decision_on, first_queues, store_decisions

FIRST, SECOND = "kp:trace:one", "kp:trace:other"
DIGEST = b"d" * 16


class Scene(NamedTuple):
    """The objects with which the resender looks for lost submissions."""

    app: Celery
    queues: SubmissionQueues
    store: Store
    redis_client: redis.Redis
    keys: Keys
    monkeypatch: pytest.MonkeyPatch

    def resend_lost(self, before_sending: Callable[[str], None]) -> None:
        """Have the resender look once, after both traces have become due."""

        def watched(app: Celery, queues: SubmissionQueues, traces: Sequence[tuple[str, bytes]]) -> None:
            for trace_id, _ in traces:
                before_sending(trace_id)
            send_traces(app, queues, traces)

        # Both were sent long ago, in this order.
        self.redis_client.zadd(self.keys.pending, {FIRST: 1, SECOND: 2})
        self.monkeypatch.setattr(submission_resender, "send_traces", watched)
        self.monkeypatch.setattr(LedgerSettings, "max_resends", 1)
        settings = LedgerSettings(resend_after_s=0.001)
        submission_resender.resend_lost(self.app, [self.queues], self.store, settings, Metrics(()), {})

    def states(self) -> list[str]:
        """Return the states of both traces."""
        return [record.state for record in self.store.ledger.look_up([FIRST, SECOND]) if record]

    def on_queue(self) -> int:
        return waiting(self.app, self.queues.traces)


@pytest.fixture
def scene(
    settings: Settings, store: Store, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """Two traces that were submitted, but whose messages never reach the queue."""
    queues = first_queues(settings)
    store.ledger.submit([Submission(trace_id, DIGEST, trace_id.encode()) for trace_id in (FIRST, SECOND)])
    with make_celery(settings) as app:
        declare_queues(app, queues.in_order)
        yield Scene(app, queues, store, redis_client, keys, monkeypatch)


def test_a_trace_resent_too_often_is_dead_lettered_before_others_are_resent(scene: Scene) -> None:
    # The resender claims this trace last, and must still dead-letter it first.
    scene.store.ledger.count_resend(SECOND)
    sent: list[tuple[str, list[str]]] = []
    scene.resend_lost(lambda trace_id: sent.append((trace_id, scene.states())))
    assert sent == [(FIRST, ["pending", "dead"])]
    assert [letter.detail for letter in scene.store.dead_letters.read()] == ["sent 2 times, never decided"]


def test_a_trace_decided_meanwhile_is_not_resent(scene: Scene) -> None:
    def decide_the_other(sent: str) -> None:
        (unsent,) = {FIRST, SECOND} - {sent}
        store_decisions(scene.store, {unsent: decision_on(unsent)}, DIGEST)

    scene.resend_lost(decide_the_other)
    assert scene.on_queue() == 1
    assert sorted(scene.states()) == ["decided", "pending"]


def test_a_trace_that_cannot_be_resent_does_not_keep_others_from_being_resent(scene: Scene) -> None:
    def refuse_one(trace_id: str) -> None:
        if trace_id == FIRST:
            raise ValueError("no broker takes this")

    scene.resend_lost(refuse_one)
    assert scene.on_queue() == 1
    assert scene.states() == ["pending", "pending"]
    # A submission that could not be sent does not count as resent. Otherwise outages would dead-letter it.
    resends = [scene.redis_client.hget(scene.keys.record(trace_id), "resends") for trace_id in (FIRST, SECOND)]
    assert resends == [None, b"1"]
