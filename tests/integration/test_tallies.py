"""What is counted of the decisions that were stored: each once, by a domain, and by what a shadow would have made of it."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
import redis
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.store import Counted, RedisLedger, Refusal, Standing, Store, Tally, Verdict
from kp_scorer.store.keys import Keys

from tests.support.traces import new_id

DIGEST: Final = b"a" * 16
OTHER_DIGEST: Final = b"b" * 16
MOST_NAMES: Final = 1_000


def verdict(tally: Tally, trace_id: str = "", digest: bytes = DIGEST, entry: str = "") -> Verdict:
    return Verdict(trace_id or new_id(), digest, b"decision", entry, tally)


@pytest.fixture
def ledger(redis_client: redis.Redis, keys: Keys) -> RedisLedger:
    return RedisLedger(redis_client, keys, ttl_ms=60_000)


def stored(ledger: RedisLedger, *tallies: Tally, comparison: str = "one") -> None:
    """Store a decision for each."""
    committed = ledger.commit([verdict(tally) for tally in tallies], comparison)
    assert all(isinstance(found, Standing) and found.is_own for found in committed)


def of_domains(*domains: str) -> Sequence[Tally]:
    """Of domains that no settings name."""
    return [Tally(domain, False) for domain in domains]


def compared(domain: str, outcomes: str) -> Tally:
    return Tally(domain, True, outcomes)


def test_only_what_is_stored_counts(ledger: RedisLedger, store: Store, redis_client: redis.Redis, keys: Keys) -> None:
    tally = compared("code", "accepted>rejected")
    first = verdict(tally)
    ledger.commit([first], "one")
    assert ledger.commit([first], "one") == [Standing(b"decision", is_own=False)]
    assert ledger.commit([verdict(tally, first.trace_id, OTHER_DIGEST)], "one") == [Refusal.CONFLICT]
    elsewhere = new_id()
    redis_client.hset(keys.record(elsewhere), mapping={"digest": DIGEST, "entry": "7-2"})
    assert ledger.commit([verdict(tally, elsewhere, entry="7-1")], "one") == [Refusal.AGAIN]
    assert store.tallies.read("one") == Counted({"code": 1}, {"code": {"accepted>rejected": 1}})
    redis_client.delete(keys.record(elsewhere))


def test_what_is_forgotten_stays_counted_and_counts_again_when_it_is_decided_anew(ledger: RedisLedger, store: Store) -> None:
    first = verdict(Tally("code", True))
    ledger.commit([first])
    ledger.erase(first.trace_id)
    assert store.tallies.read().domains == {"code": 1}
    ledger.commit([first])
    assert store.tallies.read().domains == {"code": 2}


def test_domains_are_counted_as_they_are_written(ledger: RedisLedger, store: Store) -> None:
    names = ("decided", "names", "comparison", "a b", ">", "accepted>rejected x", "\u00e9", "\ud55c\uad6d\uc5b4")
    stored(ledger, *of_domains(*names), compared("a b", "accepted>review"))
    assert store.tallies.read("one") == Counted(
        dict.fromkeys(["a b", *sorted(set(names) - {"a b"})], 1) | {"a b": 2}, {"a b": {"accepted>review": 1}}
    )


def test_who_invents_domains_for_ever_gets_no_more_fields(
    ledger: RedisLedger, store: Store, redis_client: redis.Redis, keys: Keys
) -> None:
    invented = [f"invented {number}" for number in range(MOST_NAMES + 200)]
    stored(ledger, *of_domains(*invented))
    length: Any = redis_client.hlen(keys.tallies)
    # Those that are known by now are told apart still, and so are those that settings name.
    stored(ledger, *of_domains(*invented[-50:], "invented 0"), Tally("code", True), compared("code", "review>review"))
    counted = store.tallies.read()
    assert len(counted.domains) == MOST_NAMES + 2
    assert list(counted.domains.items())[:2] == [("", 250), ("code", 2)]
    assert counted.domains["invented 0"] == 2
    assert redis_client.hlen(keys.tallies) == length + 1
    # One of them is compared under its name, and one that has none among the others.
    stored(ledger, *(Tally(domain, False, "review>accepted") for domain in ("invented 0", invented[-1])))
    assert store.tallies.read("one").outcomes == {
        "": {"review>accepted": 1},
        "code": {"review>review": 1},
        "invented 0": {"review>accepted": 1},
    }


def test_workers_that_compare_other_policies_leave_each_others_counts_alone(
    ledger: RedisLedger, store: Store, redis_client: redis.Redis, keys: Keys
) -> None:
    stored(ledger, compared("code", "accepted>rejected"), compared("qa", "review>review"))
    stored(ledger, compared("code", "accepted>accepted"), comparison="another")
    # One that compares nothing does, too.
    stored(ledger, *of_domains("code"), comparison="")
    stored(ledger, compared("code", "accepted>rejected"))
    domains = {"code": 4, "qa": 1}
    assert store.tallies.read("one") == Counted(domains, {"code": {"accepted>rejected": 2}, "qa": {"review>review": 1}})
    assert store.tallies.read("another") == Counted(domains, {"code": {"accepted>accepted": 1}})
    assert store.tallies.read() == Counted(domains, {})
    # What is compared no more goes in the end.
    assert all(redis_client.pttl(keys.compared(policies)) > 0 for policies in ("one", "another"))
    assert not redis_client.exists(keys.compared(""))


def test_what_workers_of_an_earlier_version_count_beside_is_passed_over(
    ledger: RedisLedger, store: Store, redis_client: redis.Redis, keys: Keys
) -> None:
    redis_client.hset(keys.tallies, mapping={"decided code": 1, "comparison": "one", "accepted>review code": 1})
    stored(ledger, compared("code", "accepted>rejected"))
    assert store.tallies.read("one") == Counted({"code": 2}, {"code": {"accepted>rejected": 1}})


def test_a_neighbours_key_in_their_place_is_named_before_anything_is_stored(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    for key in (keys.tallies, keys.compared("one")):
        redis_client.set(key, "a neighbour's")
        with pytest.raises(ServiceUnavailable, match=f"WRONGTYPE {key}"):
            stored(ledger, compared("code", "accepted>rejected"))
        assert ledger.counts().decided == 0
        redis_client.delete(key)
