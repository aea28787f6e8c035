"""Deciding against the ledger and the log in Redis: what is submitted again, erased, or met by several workers."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import redis
from kp_scorer.decider import Decider, NoveltyMeter
from kp_scorer.decision import Decision
from kp_scorer.errors import TraceDead, TraceHeld
from kp_scorer.novelty import Candidate
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store import Committed, Counts, Identity, RedisLog, Store, Submission, Verdict
from kp_scorer.store.keys import Keys
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import make_trace
from tests.support.fast_worker import WordHashEmbedder

ONE = "kp:trace:one"


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
        self.store.ledger.begin([Identity(trace.id, trace.digest())])

    def open(self, trace: ReasoningTrace) -> None:
        assert self.store.ledger.open([Submission(trace.id, trace.digest(), payload_of(trace))]) == ["pending"]

    def place(self, trace: ReasoningTrace) -> None:
        (vector,) = self.embedder.embed([trace.embedding_text])
        self.log.exchange([Candidate(trace.id, trace.digest(), vector)], None)

    def bury(self, trace: ReasoningTrace) -> None:
        self.store.dead_letters.bury(payload_of(trace), "scoring_failed", "ValueError", trace.id, trace.digest())


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


def trace_about(objective: str, trace_id: str = ONE) -> ReasoningTrace:
    return make_trace(trace_id=trace_id, objective=objective)


@pytest.mark.parametrize("order", ["open begin place", "begin place", "place begin", "place open", "open place begin place"])
def test_nothing_pending_expires_and_what_has_ended_does(
    worker: WorkerInProcess, redis_client: redis.Redis, keys: Keys, settings: Settings, order: str
) -> None:
    trace = trace_about("invoice")
    for step in order.split():
        getattr(worker, step)(trace)
    assert redis_client.pttl(keys.record(ONE)) == -1
    worker.decide(trace)
    assert 0 < redis_client.pttl(keys.record(ONE)) <= settings.ledger.ttl_ms


def test_a_trace_that_another_living_worker_holds_is_left_to_it(make_worker: Callable[[], WorkerInProcess]) -> None:
    holder, other = make_worker(), make_worker()
    trace = trace_about("invoice")
    holder.begin(trace)
    for _ in range(5):
        assert [type(settled) for settled in other.decider.decide([trace])] == [TraceHeld]
    decision = holder.decide(trace)
    assert other.decide(trace) == decision


def test_what_ends_its_workers_is_decided_alone_and_then_dead(
    make_worker: Callable[[], WorkerInProcess], redis_client: redis.Redis, keys: Keys
) -> None:
    deadly, other = trace_about("invoice"), trace_about("route", "kp:trace:other")
    make_worker().begin(deadly)
    redis_client.delete(keys.workers)
    second = make_worker()
    prepared = second.decider.prepare([deadly, other])
    assert [case.trace for case in prepared.begun] == [other], "it takes no other trace along"
    assert [case.trace for case in second.decider.prepare([deadly], alone=True).begun] == [deadly]
    redis_client.delete(keys.workers)
    (settled,) = make_worker().decider.decide([deadly])
    assert isinstance(settled, TraceDead)
    assert (settled.reason, settled.detail) == ("poison", "2 attempts to decide it came to no end")


@pytest.mark.parametrize("again_by", ["open", "decide"])
def test_a_dead_trace_submitted_again_is_compared_by_what_it_says_now(worker: WorkerInProcess, again_by: str) -> None:
    worker.decide(trace_about("invoice ledger", "kp:trace:invoice"))
    worker.decide(trace_about("route parcel", "kp:trace:route"))
    wrong, corrected = trace_about("invoice ledger"), trace_about("route parcel")
    worker.begin(wrong)
    worker.place(wrong)
    worker.bury(wrong)
    if again_by == "open":
        worker.open(corrected)
    decision = worker.decide(corrected)
    assert decision.novelty.duplicate_of == "kp:trace:route"
    assert decision.novelty.entry
    assert decision.novelty.entry.endswith("-4"), "its first place was that of other content"
    assert worker.store.ledger.counts() == Counts(submitted=4, pending=0, decided=3, dead=1)
    assert worker.log.erase(ONE) == 2, "what it gave up is forgotten with it"


@pytest.mark.parametrize("cut_short_when", ["pending", "decided"])
def test_a_trace_forgotten_by_half_can_still_be_decided(worker: WorkerInProcess, cut_short_when: str) -> None:
    trace = trace_about("invoice")
    worker.begin(trace)
    worker.place(trace)
    decision = worker.decide(trace) if cut_short_when == "decided" else None
    assert worker.log.erase(ONE) == 1
    again = worker.decide(trace)
    assert again == decision if decision else again.novelty.entry
    assert worker.store.ledger.counts() == Counts(submitted=1, pending=0, decided=1, dead=0)


def test_a_trace_erased_between_its_place_and_its_decision_gets_another_place(worker: WorkerInProcess) -> None:
    trace = trace_about("invoice")
    commit = worker.store.ledger.commit
    erased: list[int] = []

    def erase_first(verdicts: Sequence[Verdict], comparison: str) -> list[Committed]:
        if not erased:
            erased.append(worker.log.erase(ONE))
        return commit(verdicts, comparison)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker.store.ledger, "commit", erase_first)
        decision = worker.decide(trace)
    assert erased == [1]
    (entry,) = worker.log.entries()
    assert decision.novelty.entry == str(entry.place)
