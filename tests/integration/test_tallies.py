"""Decisions that were stored are counted, each once, by domain."""

from collections.abc import Sequence
from typing import Any, Final

import pytest
import redis
from kp_scorer.errors import ServiceUnavailable
from kp_scorer.ledger.keys import Keys
from kp_scorer.ledger.records import Tally, Verdict
from kp_scorer.ledger.redis_ledger import RedisLedger

from tests.support.builders import decision_on
from tests.support.traces import new_id

MOST_NAMES: Final = 1_000


def verdict(tally: Tally) -> Verdict:
    return Verdict(new_id(), b"a" * 16, decision_on("kp:trace:one"), "", tally)


@pytest.fixture
def ledger(redis_client: redis.Redis, keys: Keys) -> RedisLedger:
    return RedisLedger(redis_client, keys, ttl_ms=60_000)


def store_all(ledger: RedisLedger, *tallies: Tally) -> None:
    """Store a decision for each."""
    committed = ledger.commit([verdict(tally) for tally in tallies])
    assert {result.outcome for result in committed} == {"stored"}


def unnamed(*domains: str) -> Sequence[Tally]:
    """Tallies of domains that no settings name."""
    return [Tally(domain, False) for domain in domains]


def test_domains_are_counted_as_they_are_written(ledger: RedisLedger) -> None:
    names = ("decided", "names", "a b", ">", "\u00e9", "\ud55c\uad6d\uc5b4")
    store_all(ledger, *unnamed(*names, "a b"))
    assert ledger.tallies().domains == {"a b": 2} | dict.fromkeys(sorted(set(names) - {"a b"}), 1)


def test_invented_domains_beyond_the_limit_share_one_field(ledger: RedisLedger, redis_client: redis.Redis, keys: Keys) -> None:
    invented = [f"invented {number}" for number in range(MOST_NAMES + 200)]
    store_all(ledger, *unnamed(*invented))
    length: Any = redis_client.hlen(keys.tallies)
    # Those counted before keep their fields, and those that settings name get one.
    store_all(ledger, *unnamed(*invented[-50:], "invented 0"), Tally("code", True), Tally("code", True))
    domains = ledger.tallies().domains
    assert len(domains) == MOST_NAMES + 2
    assert list(domains.items())[:2] == [("", 250), ("code", 2)]
    assert domains["invented 0"] == 2
    assert redis_client.hlen(keys.tallies) == length + 1


def test_a_key_of_another_type_is_named_before_anything_is_stored(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    redis_client.set(keys.tallies, "a neighbour's")
    with pytest.raises(ServiceUnavailable, match=f"WRONGTYPE {keys.tallies}"):
        store_all(ledger, Tally("code", True))
    assert ledger.counts().decided == 0
    redis_client.delete(keys.tallies)


def test_each_guard_that_fired_counts_once_a_decision(ledger: RedisLedger) -> None:
    first, *others = (verdict(Tally("code", True, guards)) for guards in ("copies max_confidence", "max_confidence", ""))
    ledger.commit([first, *others])
    ledger.commit([first])
    assert ledger.tallies().guards == {"max_confidence": 2, "copies": 1}
