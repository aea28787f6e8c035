"""Deciding against the ledger and the log in Redis: what is submitted again, erased, lost, or met by several workers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import redis
from celery import Celery
from kp_scorer.broker.backlog import waiting
from kp_scorer.broker.celery_app import make_celery
from kp_scorer.broker.publishing import declare_queues, send_traces
from kp_scorer.broker.queues import SubmissionQueues, submission_queues
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.errors import TraceDead, TraceHeld
from kp_scorer.ledger import CommitResult, Identity, RedisLog, Store, Submission, SubmissionCounts, Tally, Verdict
from kp_scorer.ledger.keys import Keys
from kp_scorer.novelty import Candidate
from kp_scorer.process import reconciler
from kp_scorer.process.metrics import Metrics
from kp_scorer.scoring import Policy
from kp_scorer.settings import LedgerSettings, Settings
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import decision_on, make_trace
from tests.support.fast_worker import WordHashEmbedder
from tests.support.processes import wait_until

TRACE_ID = "kp:trace:one"


class WorkerInProcess:
    """A worker's decider, with a ledger, a mirror and connections of its own."""

    def __init__(self, settings: Settings) -> None:
        self.store = Store.open(settings)
        self.embedder = WordHashEmbedder(settings.embedding, "trace")
        novelty = NoveltyMeter(self.embedder, self.log, settings.novelty.window())
        self.decider = Decider(self.store.ledger, Policy(), novelty, max_attempts=2)

    @property
    def log(self) -> RedisLog:
        return self.store.novelty_log(self.embedder.space)

    def decide(self, trace: ReasoningTrace) -> Decision:
        (decided,) = self.decider.decide([trace])
        assert isinstance(decided, Decision)
        return decided

    def begin(self, trace: ReasoningTrace) -> None:
        self.store.ledger.acquire([Identity(trace.id, trace.digest())])

    def open(self, trace: ReasoningTrace) -> None:
        assert self.store.ledger.submit([Submission(trace.id, trace.digest(), payload_of(trace))]) == ["pending"]

    def place(self, trace: ReasoningTrace) -> None:
        (vector,) = self.embedder.embed([trace.embedding_text])
        self.log.append([Candidate(trace.id, trace.digest(), vector)], None)

    def dead_letter(self, trace: ReasoningTrace) -> None:
        self.store.dead_letters.dead_letter(payload_of(trace), "scoring_failed", "ValueError", trace.id, trace.digest())


@pytest.fixture
def make_worker(settings: Settings) -> Iterator[Callable[[], WorkerInProcess]]:
    made: list[WorkerInProcess] = []

    def make() -> WorkerInProcess:
        made.append(WorkerInProcess(settings))
        return made[-1]

    yield make
    for worker in made:
        worker.store.close()


@pytest.fixture
def worker(make_worker: Callable[[], WorkerInProcess]) -> WorkerInProcess:
    return make_worker()


def payload_of(trace: ReasoningTrace) -> bytes:
    return trace.model_dump_json(exclude_none=True).encode()


def trace_about(objective: str, trace_id: str = TRACE_ID) -> ReasoningTrace:
    return make_trace(trace_id=trace_id, objective=objective)


@pytest.mark.parametrize("order", ["open begin place", "begin place", "place begin", "place open", "open place begin place"])
def test_nothing_pending_expires_and_what_has_ended_does(
    worker: WorkerInProcess, redis_client: redis.Redis, keys: Keys, settings: Settings, order: str
) -> None:
    trace = trace_about("invoice")
    for step in order.split():
        getattr(worker, step)(trace)
    assert redis_client.pttl(keys.record(TRACE_ID)) == -1
    worker.decide(trace)
    assert 0 < redis_client.pttl(keys.record(TRACE_ID)) <= settings.ledger.ttl_ms


def test_a_trace_that_another_living_worker_holds_is_left_to_it(make_worker: Callable[[], WorkerInProcess]) -> None:
    holder, waiting = make_worker(), make_worker()
    trace = trace_about("invoice")
    holder.begin(trace)
    for _ in range(5):
        assert [type(resolved) for resolved in waiting.decider.decide([trace])] == [TraceHeld]
    decision = holder.decide(trace)
    assert waiting.decide(trace) == decision


def test_a_trace_that_kills_its_workers_is_decided_alone_and_then_dead(
    make_worker: Callable[[], WorkerInProcess], redis_client: redis.Redis, keys: Keys
) -> None:
    deadly, harmless = trace_about("invoice"), trace_about("route", "kp:trace:other")
    make_worker().begin(deadly)
    redis_client.delete(keys.workers)
    second = make_worker()
    cases = second.decider.acquire([deadly, harmless])
    assert [case.is_claimed for case in cases] == [False, True], "it takes no other trace along"
    (case,) = second.decider.acquire([deadly], alone=True)
    assert case.is_claimed
    redis_client.delete(keys.workers)
    (resolved,) = make_worker().decider.decide([deadly])
    assert isinstance(resolved, TraceDead)
    assert (resolved.reason, resolved.detail) == ("poison", "2 attempts to decide it came to no end")


@pytest.mark.parametrize("again_by", ["open", "decide"])
def test_a_dead_trace_submitted_again_is_compared_by_its_new_content(worker: WorkerInProcess, again_by: str) -> None:
    worker.decide(trace_about("invoice ledger", "kp:trace:invoice"))
    worker.decide(trace_about("route parcel", "kp:trace:route"))
    wrong, corrected = trace_about("invoice ledger"), trace_about("route parcel")
    worker.begin(wrong)
    worker.place(wrong)
    worker.dead_letter(wrong)
    if again_by == "open":
        worker.open(corrected)
    decision = worker.decide(corrected)
    assert decision.novelty.duplicate_of == "kp:trace:route"
    assert decision.novelty.entry
    assert decision.novelty.entry.endswith("-4"), "its first place was that of other content"
    assert worker.store.ledger.counts() == SubmissionCounts(submitted=4, pending=0, decided=3, dead=1)
    assert worker.log.erase(TRACE_ID) == 2, "what it gave up is forgotten with it"


@pytest.mark.parametrize("cut_short_when", ["pending", "decided"])
def test_a_trace_whose_erasure_was_cut_short_can_be_decided(worker: WorkerInProcess, cut_short_when: str) -> None:
    trace = trace_about("invoice")
    worker.begin(trace)
    worker.place(trace)
    decision = worker.decide(trace) if cut_short_when == "decided" else None
    assert worker.log.erase(TRACE_ID) == 1
    again = worker.decide(trace)
    assert again == decision if decision else again.novelty.entry
    assert worker.store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=1, dead=0)


def test_a_trace_erased_between_its_place_and_its_decision_gets_another_place(worker: WorkerInProcess) -> None:
    trace = trace_about("invoice")
    commit = worker.store.ledger.commit
    erased: list[int] = []

    def erase_first(verdicts: Sequence[Verdict]) -> list[CommitResult]:
        if not erased:
            erased.append(worker.log.erase(TRACE_ID))
        return commit(verdicts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.store.ledger, "commit", erase_first)
        decision = worker.decide(trace)
    assert erased == [1]
    (entry,) = worker.log.entries()
    assert decision.novelty.entry == str(entry.place)


FIRST, SECOND = "kp:trace:one", "kp:trace:other"
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
def two_lost(store: Store) -> None:
    """Two traces whose messages never reach the queue."""
    store.ledger.submit([Submission(trace_id, DIGEST, trace_id.encode()) for trace_id in (FIRST, SECOND)])


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
        reconciler.reconcile(self.app, self.queues, self.store, settings, Metrics(()))

    def states(self) -> list[str]:
        """Of the first and the second."""
        return [record.state for record in self.store.ledger.look_up([FIRST, SECOND]) if record]

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
    two_lost: None,
    app: Celery,
    queues: SubmissionQueues,
    store: Store,
    redis_client: redis.Redis,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> Scene:
    return Scene(app, queues, store, redis_client, keys, monkeypatch)


def test_a_trace_resent_too_often_is_dead_lettered_before_others_are_resent(scene: Scene) -> None:
    # Claimed in the order of their sending, so that the one to be dead-lettered is the last.
    scene.store.ledger.count_resend(SECOND)
    sent: list[tuple[str, list[str]]] = []
    scene.reconcile(lambda trace_id: sent.append((trace_id, scene.states())))
    assert sent == [(FIRST, ["pending", "dead"])]
    assert [letter.detail for letter in scene.store.dead_letters.read()] == ["sent 2 times, never decided"]


def test_a_trace_decided_meanwhile_is_not_resent(scene: Scene) -> None:
    def decide_the_other(sent: str) -> None:
        (unsent,) = {FIRST, SECOND} - {sent}
        scene.store.ledger.acquire([Identity(unsent, DIGEST)])
        scene.store.ledger.commit([Verdict(unsent, DIGEST, decision_on(unsent), "", Tally("code", is_known=True))])

    scene.reconcile(decide_the_other)
    assert scene.on_queue() == 1
    assert sorted(scene.states()) == ["decided", "pending"]


def test_a_trace_that_cannot_be_resent_keeps_no_other_from_it(scene: Scene) -> None:
    def refuse_one(trace_id: str) -> None:
        if trace_id == FIRST:
            raise ValueError("no broker takes this")

    scene.reconcile(refuse_one)
    assert scene.on_queue() == 1
    assert scene.states() == ["pending", "pending"]
    # What was not sent is not counted as sent, so it is not buried for it.
    resends = [scene.redis_client.hget(scene.keys.record(trace_id), "resends") for trace_id in (FIRST, SECOND)]
    assert resends == [None, b"1"]
