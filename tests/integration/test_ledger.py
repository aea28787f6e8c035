"""The ledger's books: every submission is counted once as submitted and ends once, as decided or dead."""

from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from kp_scorer.errors import TraceConflict
from kp_scorer.store import Counts, DeadLetters, Identity, RedisLedger, Submission, Verdict
from kp_scorer.store.keys import KEPT_S, Keys

from tests.support.processes import wait_until

TTL_MS = 60_000
ONE = "kp:trace:one"


@pytest.fixture
def ledger(redis_client: redis.Redis, keys: Keys) -> RedisLedger:
    return RedisLedger(redis_client, keys, TTL_MS)


@pytest.fixture
def letters(redis_client: redis.Redis, keys: Keys) -> DeadLetters:
    return DeadLetters(redis_client, keys, TTL_MS)


def submission(trace_id: str = ONE, digest: bytes = b"a" * 16) -> Submission:
    return Submission(trace_id, digest, b'{"id": "' + trace_id.encode() + b'"}')


IDENTITY = Identity(*submission()[:2])
VERDICT = Verdict(*IDENTITY, b'{"score": 1}')


def begin(ledger: RedisLedger, alone: bool = False) -> tuple[str, int]:
    (record,) = ledger.begin([IDENTITY], alone=alone)
    return record.state, record.attempts


def test_first_attempt_is_charged_and_later_ones_only_alone(ledger: RedisLedger) -> None:
    assert begin(ledger) == ("pending", 0)
    assert [begin(ledger), begin(ledger)] == [("pending", 1)] * 2
    assert [begin(ledger, alone=True), begin(ledger, alone=True)] == [("pending", 1), ("pending", 2)]
    assert begin(ledger) == ("pending", 3)
    ledger.refund([ONE])
    assert begin(ledger) == ("pending", 0)


def test_another_digest_is_not_charged(ledger: RedisLedger) -> None:
    begin(ledger)
    (record,) = ledger.begin([Identity(ONE, b"b" * 16)], alone=True)
    assert (record.digest, record.attempts) == (IDENTITY.digest, 1)
    assert begin(ledger) == ("pending", 1)


def test_a_decided_trace_keeps_no_copy_of_what_was_submitted(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    ledger.open([submission()])
    assert redis_client.hget(keys.record(ONE), "submission") == submission().payload
    begin(ledger)
    ledger.commit([VERDICT])
    stored: Any = redis_client.hkeys(keys.record(ONE))
    assert set(stored) == {b"state", b"digest", b"decision"}
    assert redis_client.zcard(keys.pending) == 0


def test_pending_traces_are_kept_longer_than_decided_ones(ledger: RedisLedger, redis_client: redis.Redis, keys: Keys) -> None:
    ledger.open([submission()])
    assert redis_client.pttl(keys.record(ONE)) > KEPT_S * 1_000 - 10_000
    begin(ledger)
    ledger.commit([VERDICT])
    assert 0 < redis_client.pttl(keys.record(ONE)) <= TTL_MS


def test_dead_trace_stays_dead_until_it_is_submitted_again(ledger: RedisLedger, letters: DeadLetters) -> None:
    ledger.open([submission()])
    letters.bury(b"{}", "poison", "5 attempts", ONE, attempts=5)
    (record,) = ledger.begin([IDENTITY])
    assert (record.state, record.reason, record.detail) == ("dead", "poison", "5 attempts")
    assert ledger.open([submission()]) == ["pending"]
    assert begin(ledger) == ("pending", 0)
    assert ledger.counts() == Counts(submitted=2, pending=1, decided=0, dead=1)


def test_burying_the_same_again_is_one_dead_letter(ledger: RedisLedger, letters: DeadLetters) -> None:
    for attempts in (1, 2):
        letters.bury(b"[]", "invalid", "$: expected an object", attempts=attempts)
    (letter,) = letters.read()
    assert (letter.reason, letter.attempts, letter.size_bytes, letters.payload(letter.letter_id)) == ("invalid", 2, 2, b"[]")
    assert letter.first_ms <= letter.last_ms
    assert ledger.counts() == Counts(submitted=1, pending=0, decided=0, dead=1)
    assert letters.drop(letter.letter_id)
    assert not letters.drop(letter.letter_id)
    assert list(letters.read()) == []


def test_only_what_the_queue_no_longer_holds_is_claimed(ledger: RedisLedger) -> None:
    ledger.open([submission()])
    assert ledger.claim_lost(0, queue_is_empty=False) == []
    assert ledger.claim_lost(60_000, queue_is_empty=True) == []
    (claim,) = wait_for_claim(ledger)
    assert (claim.trace_id, claim.payload, claim.resends) == (*submission()[::2], 1)
    # Sent again, so the queue must be seen empty again before it is lost once more.
    assert ledger.claim_lost(0, queue_is_empty=False) == []
    (claim,) = wait_for_claim(ledger)
    assert claim.resends == 2
    begin(ledger)
    ledger.commit([VERDICT])
    assert ledger.claim_lost(0, queue_is_empty=True) == []


def wait_for_claim(ledger: RedisLedger) -> Sequence[Any]:
    """The queue must have been empty in a later millisecond than that of the sending."""
    return wait_until(lambda: ledger.claim_lost(0, queue_is_empty=True), 10)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "begin", "commit", "bury", "conflict", "malformed", "claim", "erase"]),
        st.sampled_from(["kp:trace:one", "kp:trace:two"]),
        st.sampled_from([b"a" * 16, b"b" * 16]),
    ),
    max_size=25,
)


@hypothesis_settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_the_books_balance_whatever_happens(
    redis_client: redis.Redis, keys: Keys, ledger: RedisLedger, letters: DeadLetters, steps: list[tuple[str, str, bytes]]
) -> None:
    redis_client.flushdb()
    for step, trace_id, digest in steps:
        payload = trace_id.encode() + digest
        match step:
            case "open":
                ledger.open([Submission(trace_id, digest, payload)])
            case "begin":
                ledger.begin([Identity(trace_id, digest)])
            case "commit":
                ledger.commit([Verdict(trace_id, digest, payload)])
            case "bury":
                letters.bury(payload, "invalid", "$", trace_id)
            case "conflict":
                letters.bury(payload, "conflict", "id", trace_id)
            case "malformed":
                letters.bury(digest, "malformed", "body")
            case "claim":
                ledger.claim_lost(0, queue_is_empty=True)
            case "erase":
                ledger.erase(trace_id)
        counts = ledger.counts()
        assert counts.submitted == counts.pending + counts.decided + counts.dead
        states = [record.state for record in ledger.look_up(["kp:trace:one", "kp:trace:two"]) if record]
        assert states.count("pending") == counts.pending
        assert len(list(letters.read())) <= counts.dead


def test_conflicts_do_no_harm_to_the_trace_they_name(ledger: RedisLedger, letters: DeadLetters) -> None:
    ledger.open([submission()])
    assert isinstance(ledger.open([submission(digest=b"b" * 16)])[0], TraceConflict)
    letters.bury(b"{}", "conflict", "id", ONE)
    assert begin(ledger) == ("pending", 0)
    assert ledger.counts() == Counts(submitted=2, pending=1, decided=0, dead=1)
