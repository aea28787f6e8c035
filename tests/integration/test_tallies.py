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


def stored(ledger: RedisLedger, *tallies: Tally) -> None:
    """Store a decision for each."""
    assert all(isinstance(found, Standing) and found.is_own for found in ledger.commit([verdict(tally) for tally in tallies]))


def of_domains(*domains: str) -> Sequence[Tally]:
    """Of domains that no settings name."""
    return [Tally(domain, False) for domain in domains]


def compared(domain: str, outcomes: str, comparison: str = "one") -> Tally:
    return Tally(domain, True, comparison, outcomes)


def test_only_what_is_stored_counts(ledger: RedisLedger, store: Store, redis_client: redis.Redis, keys: Keys) -> None:
    tally = compared("code", "accepted>rejected")
    first = verdict(tally)
    ledger.commit([first])
    assert ledger.commit([first]) == [Standing(b"decision", is_own=False)]
    assert ledger.commit([verdict(tally, first.trace_id, OTHER_DIGEST)]) == [Refusal.CONFLICT]
    elsewhere = new_id()
    redis_client.hset(keys.record(elsewhere), mapping={"digest": DIGEST, "entry": "7-2"})
    assert ledger.commit([verdict(tally, elsewhere, entry="7-1")]) == [Refusal.AGAIN]
    assert store.tallies.read() == Counted({"code": 1}, "one", {"code": {"accepted>rejected": 1}})
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
    assert store.tallies.read() == Counted(
        dict.fromkeys(["a b", *sorted(set(names) - {"a b"})], 1) | {"a b": 2}, "one", {"a b": {"accepted>review": 1}}
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
    assert redis_client.hlen(keys.tallies) == length + 3
    # One of them is compared under its name, and one that has none among the others.
    stored(ledger, *(Tally(domain, False, "one", "review>accepted") for domain in ("invented 0", invented[-1])))
    assert store.tallies.read().outcomes == {
        "": {"review>accepted": 1},
        "code": {"review>review": 1},
        "invented 0": {"review>accepted": 1},
    }


def test_comparisons_of_different_policies_do_not_mix(ledger: RedisLedger, store: Store) -> None:
    stored(ledger, *[compared("code", "accepted>rejected")] * 2, compared("qa", "review>review"))
    # A worker that compares nothing leaves them as they are.
    stored(ledger, *of_domains("code"))
    assert store.tallies.read().outcomes == {"code": {"accepted>rejected": 2}, "qa": {"review>review": 1}}
    stored(ledger, compared("code", "accepted>accepted", "another"))
    assert store.tallies.read() == Counted({"code": 4, "qa": 1}, "another", {"code": {"accepted>accepted": 1}})


def test_a_neighbours_key_in_their_place_is_named_before_anything_is_stored(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    redis_client.set(keys.tallies, "a neighbour's")
    with pytest.raises(ServiceUnavailable, match=f"WRONGTYPE {keys.tallies}"):
        stored(ledger, *of_domains("code"))
    assert ledger.counts().decided == 0
    redis_client.delete(keys.tallies)
