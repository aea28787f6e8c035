"""What is lost is sent again, what was sent often enough is buried, and in which order, on a real Redis for books and queue."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import redis
from celery import Celery
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues, send_traces, waiting
from kp_scorer.broker.queues import SubmissionQueues, submission_queues
from kp_scorer.process import reconciler
from kp_scorer.process.observer import Observer
from kp_scorer.process.reconciler import Reconciler
from kp_scorer.settings import LedgerSettings, Settings
from kp_scorer.store import Identity, Store, Submission, Tally, Verdict
from kp_scorer.store.keys import Keys

from tests.support.builders import decision_on
from tests.support.processes import wait_until

ONE, OTHER = "kp:trace:one", "kp:trace:other"
DIGEST = b"d" * 16
RESEND_AFTER_MS = 1


@pytest.fixture
def queues(settings: Settings) -> SubmissionQueues:
    return submission_queues(settings)


@pytest.fixture
def app(settings: Settings, queues: SubmissionQueues) -> Iterator[Celery]:
    with make_celery(settings) as opened:
        declare_queues(opened, queues.in_order)
        yield opened


@pytest.fixture(autouse=True)
def two_lost(store: Store) -> None:
    """Two traces whose messages never reach the queue."""
    store.ledger.open([Submission(trace_id, DIGEST, trace_id.encode()) for trace_id in (ONE, OTHER)])


class Scene(NamedTuple):
    """One look at what is lost, and what came of it."""

    app: Celery
    queues: SubmissionQueues
    store: Store
    redis_client: redis.Redis
    keys: Keys
    monkeypatch: pytest.MonkeyPatch

    def reconcile(self, before_sending: Callable[[str], None]) -> None:
        """Look once, when all that is pending is due."""

        def watched(app: Celery, queues: SubmissionQueues, traces: Sequence[tuple[str, bytes]]) -> None:
            for trace_id, _ in traces:
                before_sending(trace_id)
            send_traces(app, queues, traces)

        self._wait_until_due()
        self.monkeypatch.setattr(reconciler, "send_traces", watched)
        settings = LedgerSettings(resend_after_s=RESEND_AFTER_MS / 1_000, max_resends=1)
        Reconciler(self.app, self.queues, self.store, settings, Observer(())).reconcile()

    def states(self) -> list[str]:
        """Of the one and the other."""
        return [record.state for record in self.store.ledger.look_up([ONE, OTHER]) if record]

    def on_queue(self) -> int:
        return waiting(self.app, self.queues.traces)

    def _wait_until_due(self) -> None:
        sent: Any = self.redis_client.zrange(self.keys.pending, 0, -1, withscores=True)
        last_ms = max(sent_ms for _, sent_ms in sent)

        def are_due() -> bool:
            seconds, microseconds = self.redis_client.time()
            return bool(seconds * 1_000 + microseconds // 1_000 > last_ms + RESEND_AFTER_MS)

        wait_until(are_due, 10)


@pytest.fixture
def scene(
    app: Celery, queues: SubmissionQueues, store: Store, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> Scene:
    return Scene(app, queues, store, redis_client, keys, monkeypatch)


def test_what_was_sent_often_enough_is_buried_before_others_are_sent(scene: Scene) -> None:
    # Claimed in the order of their sending, so that the one to be buried is the last.
    scene.store.ledger.resent(OTHER)
    seen: list[tuple[str, list[str]]] = []
    scene.reconcile(lambda trace_id: seen.append((trace_id, scene.states())))
    assert seen == [(ONE, ["pending", "dead"])]
    assert [letter.detail for letter in scene.store.dead_letters.read()] == ["sent 2 times, never decided"]


def test_what_ends_while_others_are_sent_is_not_sent(scene: Scene) -> None:
    def decide_the_other(sent: str) -> None:
        (other,) = {ONE, OTHER} - {sent}
        scene.store.ledger.begin([Identity(other, DIGEST)])
        scene.store.ledger.commit([Verdict(other, DIGEST, decision_on(other), "", Tally("code", is_known=True))])

    scene.reconcile(decide_the_other)
    assert scene.on_queue() == 1
    assert sorted(scene.states()) == ["decided", "pending"]


def test_one_that_cannot_be_sent_does_not_keep_others_from_it(scene: Scene) -> None:
    def refuse_one(trace_id: str) -> None:
        if trace_id == ONE:
            raise ValueError("no broker takes this")

    scene.reconcile(refuse_one)
    assert scene.on_queue() == 1
    assert scene.states() == ["pending", "pending"]
    # What was not sent is not counted as sent, so it is not buried for it.
    resends = [scene.redis_client.hget(scene.keys.record(trace_id), "resends") for trace_id in (ONE, OTHER)]
    assert resends == [None, b"1"]
