"""What is lost is sent again, what was sent often enough is buried, and in which order, on a real Redis for books and queue."""

from collections.abc import Iterator, Sequence
from typing import Any

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


@pytest.fixture
def reconciling(app: Celery, queues: SubmissionQueues, store: Store) -> Reconciler:
    settings = LedgerSettings(resend_after_s=RESEND_AFTER_MS / 1_000, max_resends=1)
    return Reconciler(app, queues, store, settings, Observer(()))


@pytest.fixture(autouse=True)
def two_lost(store: Store) -> None:
    """Two traces whose messages never reach the queue."""
    store.ledger.open([Submission(trace_id, DIGEST, trace_id.encode()) for trace_id in (ONE, OTHER)])


def wait_until_due(redis_client: redis.Redis, keys: Keys) -> None:
    """Wait until one look claims all that is pending."""
    sent: Any = redis_client.zrange(keys.pending, 0, -1, withscores=True)
    last_ms = max(sent_ms for _, sent_ms in sent)

    def are_due() -> bool:
        seconds, microseconds = redis_client.time()
        return bool(seconds * 1_000 + microseconds // 1_000 > last_ms + RESEND_AFTER_MS)

    wait_until(are_due, 10)


def states(store: Store, *trace_ids: str) -> list[str]:
    return [record.state for record in store.ledger.look_up(trace_ids) if record]


def test_what_was_sent_often_enough_is_buried_before_others_are_sent(
    reconciling: Reconciler, store: Store, redis_client: redis.Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Claimed in the order of their sending, so that the one to be buried is the last.
    store.ledger.resent(OTHER)
    wait_until_due(redis_client, keys)
    seen: list[tuple[str, list[str]]] = []

    def watched(app: Celery, queues: SubmissionQueues, traces: Sequence[tuple[str, bytes]]) -> None:
        seen.extend((trace_id, states(store, OTHER)) for trace_id, _ in traces)
        send_traces(app, queues, traces)

    monkeypatch.setattr(reconciler, "send_traces", watched)
    reconciling.reconcile()
    assert seen == [(ONE, ["dead"])]
    assert [letter.detail for letter in store.dead_letters.read()] == ["sent 2 times, never decided"]


def test_what_ends_while_others_are_sent_is_not_sent(
    reconciling: Reconciler,
    app: Celery,
    queues: SubmissionQueues,
    store: Store,
    redis_client: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_until_due(redis_client, keys)

    def decided_meanwhile(app: Celery, queues: SubmissionQueues, traces: Sequence[tuple[str, bytes]]) -> None:
        ((sent, _),) = traces
        (other,) = {ONE, OTHER} - {sent}
        store.ledger.begin([Identity(other, DIGEST)])
        store.ledger.commit([Verdict(other, DIGEST, decision_on(other), "", Tally("code", is_known=True))])
        send_traces(app, queues, traces)

    monkeypatch.setattr(reconciler, "send_traces", decided_meanwhile)
    reconciling.reconcile()
    assert waiting(app, queues.traces) == 1
    assert sorted(states(store, ONE, OTHER)) == ["decided", "pending"]


def test_one_that_cannot_be_sent_does_not_keep_others_from_it(
    reconciling: Reconciler,
    app: Celery,
    queues: SubmissionQueues,
    store: Store,
    redis_client: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_until_due(redis_client, keys)

    def refused(app: Celery, queues: SubmissionQueues, traces: Sequence[tuple[str, bytes]]) -> None:
        if traces[0][0] == ONE:
            raise ValueError("no broker takes this")
        send_traces(app, queues, traces)

    monkeypatch.setattr(reconciler, "send_traces", refused)
    reconciling.reconcile()
    assert waiting(app, queues.traces) == 1
    assert states(store, ONE, OTHER) == ["pending", "pending"]
    # What was not sent is not counted as sent, so it is not buried for it.
    assert [redis_client.hget(keys.record(trace_id), "resends") for trace_id in (ONE, OTHER)] == [None, b"1"]
