"""What becomes of a trace in the ledger, step by step."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import redis
from kp_scorer.cli.ids import whole_trace_id
from kp_scorer.decision import Decision
from kp_scorer.errors import TraceConflict
from kp_scorer.settings import LedgerSettings, Settings, load_settings
from kp_scorer.store import (
    Counts,
    DeadLetters,
    Death,
    Drops,
    Identity,
    RedisLedger,
    Refusal,
    Standing,
    Store,
    Submission,
    Tally,
    Verdict,
)
from kp_scorer.store.keys import Keys

from tests.support.builders import decision_on
from tests.support.processes import wait_until

TTL_MS = 60_000
LEASE_MS = 60_000
ONE = "kp:trace:one"
DIGEST, OTHER_DIGEST = b"a" * 16, b"b" * 16
IDENTITY = Identity(ONE, DIGEST)
TALLY = Tally("code", is_known=True)


MakeLedger = Callable[..., RedisLedger]


@pytest.fixture
def make_ledger(redis_client: redis.Redis, keys: Keys) -> MakeLedger:
    """Ledgers of several workers."""
    return lambda lease_ms=LEASE_MS: RedisLedger(redis_client, keys, TTL_MS, lease_ms)


@pytest.fixture
def ledger(make_ledger: MakeLedger) -> RedisLedger:
    return make_ledger()


@pytest.fixture
def letters(redis_client: redis.Redis, keys: Keys) -> DeadLetters:
    return DeadLetters(redis_client, keys, LedgerSettings(ttl_s=TTL_MS / 1_000))


@pytest.fixture
def kill_workers(redis_client: redis.Redis, keys: Keys) -> Callable[[], object]:
    """Makes all workers so far ones that have not been heard of for long."""
    return lambda: redis_client.delete(keys.workers)


def submission(trace_id: str = ONE, digest: bytes = DIGEST) -> Submission:
    return Submission(trace_id, digest, b'{"id": "' + trace_id.encode() + b'"}')


def verdict(trace_id: str = ONE, digest: bytes = DIGEST, entry: str = "") -> Verdict:
    return Verdict(trace_id, digest, decision_on(trace_id), entry, TALLY)


def begin(ledger: RedisLedger, alone: bool = False, digest: bytes = DIGEST) -> tuple[str, int, bool]:
    (record,) = ledger.begin([Identity(ONE, digest)], alone=alone)
    return record.state, record.attempts, record.is_held


def test_the_same_trace_at_several_workers_is_held_by_one_and_charges_nothing(make_ledger: MakeLedger) -> None:
    holder, *others = (make_ledger() for _ in range(4))
    assert begin(holder) == ("pending", 0, False)
    for other in others:
        assert [begin(other), begin(other, alone=True)] == [("pending", 0, True)] * 2
    assert begin(holder) == ("pending", 0, False), "twice in one batch is no attempt either"
    holder.release([ONE])
    assert begin(others[0]) == ("pending", 0, False)
    assert begin(holder) == ("pending", 0, True)


def test_what_another_worker_holds_it_alone_lets_go_of(make_ledger: MakeLedger) -> None:
    holder, other = make_ledger(), make_ledger()
    begin(holder)
    other.release([ONE])
    assert begin(other) == ("pending", 0, True)


def test_a_dead_holder_is_charged_once_and_its_trace_goes_on_alone(
    make_ledger: MakeLedger, kill_workers: Callable[[], object]
) -> None:
    holder, *others = (make_ledger() for _ in range(3))
    begin(holder)
    kill_workers()
    # Begun with others it is not held, so that whoever meets it may decide it alone, but it is charged only the first time.
    assert [begin(other) for other in others] == [("pending", 1, False)] * 2
    assert begin(others[0], alone=True) == ("pending", 1, False)
    assert begin(others[1], alone=True) == ("pending", 1, True)
    kill_workers()
    assert begin(others[1], alone=True) == ("pending", 2, False)


def test_a_lease_that_is_over_is_no_death(make_ledger: MakeLedger) -> None:
    stuck, other = make_ledger(lease_ms=1), make_ledger()
    begin(stuck)
    assert wait_until(lambda: (found := begin(other)) and not found[2] and found, 10) == ("pending", 0, False)


def test_a_worker_that_renews_is_alive(make_ledger: MakeLedger, kill_workers: Callable[[], object]) -> None:
    holder, other = make_ledger(), make_ledger()
    begin(holder)
    kill_workers()
    holder.renew()
    assert begin(other) == ("pending", 0, True)


def test_another_digest_is_not_charged(make_ledger: MakeLedger, kill_workers: Callable[[], object]) -> None:
    holder, other = make_ledger(), make_ledger()
    begin(holder)
    kill_workers()
    (record,) = other.begin([Identity(ONE, OTHER_DIGEST)], alone=True)
    assert (record.digest, record.attempts) == (DIGEST, 0)


def test_a_decided_trace_keeps_no_copy_of_what_was_submitted(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    ledger.open([submission()])
    assert redis_client.hget(keys.record(ONE), "submission") == submission().payload
    begin(ledger)
    ledger.commit([verdict()])
    stored: Any = redis_client.hkeys(keys.record(ONE))
    assert set(stored) == {b"state", b"digest", b"decision", b"as_letter"}
    assert redis_client.zcard(keys.pending) == 0


def test_the_first_end_stands(ledger: RedisLedger, letters: DeadLetters) -> None:
    first, second = verdict(), verdict()
    assert ledger.commit([first, second]) == [Standing(first.decision, True), Standing(first.decision, False)]
    assert ledger.commit([verdict(digest=OTHER_DIGEST)]) == [Refusal.CONFLICT]
    begin(ledger)
    assert letters.bury(b"{}", "poison", "5 attempts", ONE, DIGEST) == Decision.model_validate_json(first.decision)
    assert list(letters.read()) == []
    assert ledger.counts() == Counts(submitted=1, pending=0, decided=1, dead=0)


def test_a_dead_trace_gets_no_decision(ledger: RedisLedger, letters: DeadLetters) -> None:
    begin(ledger)
    assert letters.bury(b"{}", "poison", "5 attempts", ONE, DIGEST) is None
    assert ledger.commit([verdict(), verdict(digest=OTHER_DIGEST)]) == [Death("poison", "5 attempts"), Refusal.CONFLICT]
    assert ledger.counts() == Counts(submitted=1, pending=0, decided=0, dead=1)


def test_a_decision_that_rests_on_another_place_is_to_be_made_again(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    begin(ledger)
    redis_client.hset(keys.record(ONE), "entry", "7-2")
    assert ledger.commit([verdict(entry="7-1")]) == [Refusal.AGAIN]
    assert begin(ledger)[0] == "pending"
    assert ledger.commit([verdict(entry="7-2")])[0] != Refusal.AGAIN


def test_dead_trace_stays_dead_until_it_is_submitted_again(ledger: RedisLedger, letters: DeadLetters) -> None:
    ledger.open([submission()])
    letters.bury(submission().payload, "poison", "5 attempts", ONE, DIGEST, deliveries=5)
    (record,) = ledger.begin([IDENTITY])
    assert (record.state, record.reason, record.detail) == ("dead", "poison", "5 attempts")
    assert ledger.open([submission()]) == ["pending"]
    assert begin(ledger) == ("pending", 0, False)
    assert ledger.counts() == Counts(submitted=2, pending=1, decided=0, dead=1)


@pytest.mark.parametrize("invalid_comes", ["before", "after", "before and after"])
def test_an_invalid_message_with_the_id_of_a_valid_trace_leaves_that_alone(
    ledger: RedisLedger, letters: DeadLetters, invalid_comes: str
) -> None:
    def bury_invalid() -> None:
        assert letters.bury(b'{"id": "kp:trace:one", "steps": []}', "invalid", "steps: expected more", ONE) is None

    if "before" in invalid_comes:
        bury_invalid()
    ledger.open([submission()])
    if "after" in invalid_comes:
        bury_invalid()
    assert begin(ledger) == ("pending", 0, False)
    assert [isinstance(committed, Standing) for committed in ledger.commit([verdict()])] == [True]
    assert ledger.counts() == Counts(submitted=2, pending=0, decided=1, dead=1)


def test_burying_the_same_again_is_one_dead_letter(ledger: RedisLedger, letters: DeadLetters) -> None:
    for deliveries in (1, 2):
        letters.bury(b"[]", "invalid", "$: expected an object", deliveries=deliveries)
    (letter,) = letters.read()
    assert (letter.reason, letter.deliveries, letter.size_bytes, letters.payload(letter.letter_id)) == ("invalid", 2, 2, b"[]")
    assert letter.first_ms <= letter.last_ms
    assert ledger.counts() == Counts(submitted=1, pending=0, decided=0, dead=1)
    assert letters.drop(letter)
    assert not letters.drop(letter)
    assert list(letters.read()) == []


def test_a_letter_buried_again_while_it_is_replayed_is_kept(ledger: RedisLedger, letters: DeadLetters) -> None:
    ledger.open([submission()])
    letters.bury(submission().payload, "poison", "5 attempts", ONE, DIGEST)
    (replayed,) = letters.read()
    assert ledger.open([submission()]) == ["pending"]
    letters.bury(submission().payload, "scoring_failed", "ValueError", ONE, DIGEST)
    assert not letters.drop(replayed)
    (letter,) = letters.read()
    assert (letter.letter_id, letter.reason, letter.burials) == (replayed.letter_id, "scoring_failed", 2)
    assert begin(ledger)[0] == "dead"
    assert ledger.counts() == Counts(submitted=2, pending=0, decided=0, dead=2)


def test_dropping_a_letter_forgets_what_died_of_it_and_nothing_else(ledger: RedisLedger, letters: DeadLetters) -> None:
    letters.bury(b"{}", "invalid", "$", ONE)
    (first,) = letters.read()
    letters.bury(b"[]", "invalid", "$", ONE)
    assert letters.drop(first)
    assert begin_states(ledger) == ["dead"], "it is dead by the second letter"
    (second,) = letters.read()
    letters.drop(second)
    assert begin_states(ledger) == []


@pytest.mark.parametrize("bound", [{"max_dead_letters": 250}, {"max_dead_letter_bytes": 250}])
def test_the_oldest_letters_make_room_with_what_died_by_them(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys, bound: dict[str, int]
) -> None:
    letters = DeadLetters(redis_client, keys, LedgerSettings(**bound))
    # An empty one takes no room, and is in nobody's way.
    letters.bury(b"", "invalid", "$")
    for number in range(256):
        letters.bury(bytes([number]), "invalid", "$", f"kp:trace:{number}")
    assert redis_client.hget(keys.letter_sizes, "total") == b"250"
    kept = {letter.trace_id for letter in letters.read()}
    assert len(kept) == 250
    # Which of those goes first that are buried within a millisecond is left to chance.
    assert kept > {f"kp:trace:{number}" for number in range(56, 256)}
    trace_ids = [f"kp:trace:{number}" for number in range(256)]
    assert {trace_id for trace_id, record in zip(trace_ids, ledger.look_up(trace_ids), strict=True) if record} == kept
    assert Drops(redis_client, keys).counts() == {"dead letters": 7}
    # One that is larger than everything takes the room of all, in several steps, and stays.
    if "max_dead_letter_bytes" in bound:
        letters.bury(b"large" * 100, "invalid", "$")
        assert [letter.size_bytes for letter in letters.read()] == [500]
        assert Drops(redis_client, keys).counts() == {"dead letters": 257}
    assert ledger.counts().dead == ledger.counts().submitted


def begin_states(ledger: RedisLedger) -> list[str]:
    return [record.state for record in ledger.look_up([ONE]) if record]


def test_only_what_the_queue_no_longer_holds_is_claimed(ledger: RedisLedger) -> None:
    ledger.open([submission()])
    assert ledger.claim_lost(0, queue_is_empty=False) == []
    assert ledger.claim_lost(60_000, queue_is_empty=True) == []
    (claim,) = wait_for_claim(ledger)
    assert (claim.trace_id, claim.payload, claim.resends) == (*submission()[::2], 0)
    ledger.resent(ONE)
    # Sent again, so the queue must be seen empty again before it is lost once more.
    assert ledger.claim_lost(0, queue_is_empty=False) == []
    (claim,) = wait_for_claim(ledger)
    assert claim.resends == 1
    begin(ledger)
    assert ledger.claim_lost(0, queue_is_empty=True) == [], "a worker is deciding it"
    ledger.commit([verdict()])
    assert ledger.claim_lost(0, queue_is_empty=True) == []


def test_what_is_sent_again_is_noted_also_while_redis_is_full(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    ledger.open([submission()])
    redis_client.config_set("maxmemory", 1)
    try:
        ledger.resent(ONE)
    finally:
        redis_client.config_set("maxmemory", 0)
    assert redis_client.hget(keys.record(ONE), "resends") == b"1"


def test_what_has_ended_is_not_noted_as_sent_again(ledger: RedisLedger, redis_client: redis.Redis, keys: Keys) -> None:
    ledger.open([submission()])
    ledger.commit([verdict()])
    ledger.resent(ONE)
    assert redis_client.hget(keys.record(ONE), "resends") is None
    assert ledger.counts() == Counts(submitted=1, pending=0, decided=1, dead=0)


def wait_for_claim(ledger: RedisLedger) -> Sequence[Any]:
    """The queue must have been empty in a later millisecond than that of the sending."""
    return wait_until(lambda: ledger.claim_lost(0, queue_is_empty=True), 10)


def test_conflicts_do_no_harm_to_the_trace_they_name(ledger: RedisLedger, letters: DeadLetters) -> None:
    ledger.open([submission()])
    assert isinstance(ledger.open([submission(digest=OTHER_DIGEST)])[0], TraceConflict)
    letters.bury(b"{}", "conflict", "id", ONE, OTHER_DIGEST)
    assert begin(ledger) == ("pending", 0, False)
    assert ledger.counts() == Counts(submitted=2, pending=1, decided=0, dead=1)


def test_ids_are_found_by_their_beginning_whatever_characters_they_have(ledger: RedisLedger) -> None:
    ends = ["a", "ab", "a*", "a*b", "a?", "a[b]", "a\\", "b", "A"]
    ledger.begin([Identity(f"kp:trace:{end}", DIGEST) for end in ends])
    for beginning in (*ends, "a[", "c"):
        found = ledger.begins(f"kp:trace:{beginning}", 20)
        assert found is not None
        assert sorted(found) == sorted(f"kp:trace:{end}" for end in ends if end.startswith(beginning))
    assert len(ledger.begins("kp:trace:a", 2) or ()) == 2


def test_a_pending_trace_tells_since_when_and_what_it_is(ledger: RedisLedger, redis_client: redis.Redis) -> None:
    seconds, _ = redis_client.time()
    ledger.open([submission()])
    waiting = ledger.waiting(ONE)
    assert waiting is not None
    assert waiting.since_ms >= seconds * 1_000
    assert waiting[1:] == (0, 0, submission().payload)
    begin(ledger)
    ledger.commit([verdict()])
    assert ledger.waiting(ONE) is None


def test_all_decisions_are_read_and_nothing_else(ledger: RedisLedger, redis_client: redis.Redis, keys: Keys) -> None:
    ids = [f"kp:trace:{number}" for number in range(1_200)]
    for some in (ids[:600], ids[600:]):
        ledger.begin([Identity(trace_id, DIGEST) for trace_id in some])
    decided = [Verdict(trace_id, DIGEST, decision_on(trace_id), "", TALLY) for trace_id in ids[:1_100]]
    ledger.commit(decided)

    found = list(ledger.all_decided())

    assert sorted(each.decision.trace_id for each in found) == sorted(ids[:1_100])
    assert {each.digest for each in found} == {DIGEST}


def test_who_may_not_look_for_ids_means_no_trace_by_a_beginning(redis_client: redis.Redis, settings: Settings) -> None:
    redis_client.acl_setuser("no-scan", True, passwords=["+secret"], keys=["*"], categories=["+@all"], commands=["-scan"])
    url = f"redis://no-scan:secret@{settings.redis.url.partition('@')[2]}"
    blind = load_settings({"broker.url": settings.broker.url, "redis.url": url})
    try:
        with Store.open(blind) as store:
            # The only one that can be seen of those that begin so; of the others nobody knows here.
            assert whole_trace_id("abc", store.ledger, lambda: ["kp:trace:abc2"]) == "abc"
            assert whole_trace_id("abc2", store.ledger, lambda: ["kp:trace:abc2"]) == "kp:trace:abc2"
    finally:
        redis_client.acl_deluser("no-scan")
