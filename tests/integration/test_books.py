"""The ledger's books: every submission is counted once as submitted and ends once, as decided or dead."""

from typing import Any, Final

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kp_scorer.decision import Decision
from kp_scorer.settings import LedgerSettings
from kp_scorer.store import DeadLetters, Identity, RedisLedger, Submission, Tally, Verdict
from kp_scorer.store.keys import Keys

from tests.support.builders import decision_on

IDS: Final = ("kp:trace:one", "kp:trace:two")
KEYS: Final = Keys("kp")
WORKERS: Final = 2

STEPS: Final = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("open", "begin", "begin alone", "commit", "release", "die", "bury", "bury undecoded", "malformed"),
                *("claim", "resent", "drop", "erase"),
            ]
        ),
        st.sampled_from(IDS),
        st.sampled_from([b"a" * 16, b"b" * 16]),
        st.integers(0, WORKERS - 1),
    ),
    max_size=25,
)


class Scene:
    """Two workers on one ledger, and all that can happen in it."""

    def __init__(self, redis_client: redis.Redis) -> None:
        redis_client.flushdb()
        self.redis_client = redis_client
        self.workers = [RedisLedger(redis_client, KEYS, ttl_ms=60_000, lease_ms=60_000) for _ in range(WORKERS)]
        self.letters = DeadLetters(redis_client, KEYS, LedgerSettings(ttl_s=60))
        self.decided: dict[str, bytes] = {}

    def step(self, step: str, trace_id: str, digest: bytes, worker: int) -> None:
        """Do one thing."""
        ledger, payload = self.workers[worker], trace_id.encode() + digest
        match step:
            case "open":
                ledger.open([Submission(trace_id, digest, payload)])
            case "begin" | "begin alone":
                ledger.begin([Identity(trace_id, digest)], alone=step == "begin alone")
            case "commit":
                ledger.commit([Verdict(trace_id, digest, decision_on(trace_id), "", Tally("code", is_known=True))])
            case "release":
                ledger.release([trace_id])
            case "die":
                self.workers[worker] = RedisLedger(self.redis_client, KEYS, ttl_ms=60_000, lease_ms=60_000)
                self.redis_client.delete(KEYS.workers)
            case "bury":
                self.letters.bury(payload, "conflict", "id", trace_id, digest)
            case "bury undecoded":
                self.letters.bury(payload, "invalid", "$", trace_id)
            case "malformed":
                self.letters.bury(digest, "malformed", "body")
            case "claim":
                ledger.claim_lost(0, queue_is_empty=True)
            case "resent":
                ledger.resent(trace_id)
            case "drop":
                for letter in list(self.letters.read())[:1]:
                    self.letters.drop(letter)
            case "erase":
                ledger.erase(trace_id)
                self.decided.pop(trace_id, None)

    def check(self) -> None:
        """Every book says the same."""
        counts = self.workers[0].counts()
        assert min(counts) >= 0
        assert counts.submitted == counts.pending + counts.decided + counts.dead
        records = {trace_id: record for trace_id, record in zip(IDS, self.workers[0].look_up(IDS), strict=True) if record}
        pending: Any = self.redis_client.zrange(KEYS.pending, 0, -1)
        assert {trace_id.decode() for trace_id in pending} == {
            trace_id for trace_id, record in records.items() if record.state == "pending"
        }
        letters = {letter.letter_id for letter in self.letters.read()}
        assert len(letters) <= counts.dead
        for trace_id, record in records.items():
            letter: Any = self.redis_client.hget(KEYS.record(trace_id), "letter")
            assert (record.state == "dead") == (record.reason is not None) == (letter is not None)
            assert letter is None or letter.decode() in letters
            assert (record.state == "decided") == bool(record.decision)
            if record.decision:
                assert self.decided.setdefault(trace_id, record.decision) == record.decision
        assert self.decided.keys() <= {trace_id for trace_id, record in records.items() if record.decision}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_the_books_balance_whatever_happens(redis_client: redis.Redis, steps: list[tuple[str, str, bytes, int]]) -> None:
    scene = Scene(redis_client)
    for step in steps:
        scene.step(*step)
        scene.check()


@pytest.mark.parametrize("trace_id", IDS)
def test_the_decision_of_these_tests_is_one(trace_id: str) -> None:
    assert Decision.model_validate_json(decision_on(trace_id)).trace_id == trace_id
