"""Junk among the dead letters pushes out only other junk, never a trace that failed, and leaves Redis room for traces."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from kp_scorer.errors import Reason, ServiceUnavailable
from kp_scorer.process.metrics import Metrics
from kp_scorer.settings import Settings
from kp_scorer.settings.sections import LedgerSettings
from kp_scorer.store import Store
from kp_scorer.store.connection import connect
from kp_scorer.store.dead_letters import DeadLettering, DeadLetters
from kp_scorer.store.keys import Keys
from kp_scorer.store.records import Submission

from tests.support.servers import redis_servers
from tests.support.shipped import Shipped

MB: Final = 2**20
DIGEST: Final = bytes(16)
MOST: Final = 120
FAILED: Final[tuple[Reason, ...]] = ("poison", "scoring_failed", "lost", "damaged")

# Our scripts treat bytes and counts alike on every server, so one server is enough.
pytestmark = pytest.mark.parametrize("shipped_redis", redis_servers()[:1], indirect=True)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(())


@pytest.fixture
def of_worker(settings: Settings) -> Iterator[redis.Redis]:
    with connect(settings.redis, settings.broker.timeout_s) as connection:
        yield connection


@pytest.fixture
def small(tmp_path: Path, shipped_redis: Shipped) -> Iterator[tuple[Store, Any]]:
    """The store in a Redis of its own, so small that junk could fill it, and its administrator's connection."""
    server = Shipped(tmp_path, str(shipped_redis.process.args[0]))  # type: ignore[index]
    with server.connect("administrator") as admin, Store.open(server.settings("worker")) as store:
        yield store, admin
    server.stop()


def keep_failed(letters: DeadLetters) -> set[str]:
    """Store dead letters that junk must not push out; return their trace ids."""
    for reason in FAILED:
        letters.dead_letter(os.urandom(10_000), DeadLettering(reason, "$", f"kp:trace:acme:{reason}", DIGEST))
    return {f"kp:trace:acme:{reason}" for reason in FAILED}


def limited(max_dead_letters: int, max_dead_letter_bytes: int = 2**28) -> LedgerSettings:
    constants = {"max_dead_letters": max_dead_letters, "max_dead_letter_bytes": max_dead_letter_bytes}
    settings: LedgerSettings = type("LimitedLedger", (LedgerSettings,), {"__module__": __name__, **constants})()
    return settings


def flood(letters: DeadLetters, count: int, size_bytes: int, reason: Reason, name: str = "") -> None:
    for number in range(count):
        letters.dead_letter(os.urandom(size_bytes), DeadLettering(reason, "$", name.format(number)))


@pytest.mark.parametrize("name", ["", "kp:trace:{}", "kp:trace:evil:{}", "kp:trace:evil {}:1"])
@pytest.mark.parametrize("reason", ["malformed", "invalid", "conflict"])
@pytest.mark.parametrize(("count", "size_bytes"), [(17, MB // 8), (2 * MOST, 10)])
def test_junk_pushes_out_junk(
    of_worker: redis.Redis, keys: Keys, store: Store, metrics: Metrics, reason: Reason, name: str, count: int, size_bytes: int
) -> None:
    bounded = DeadLetters(of_worker, keys, limited(MOST, 2 * MB))
    bounded.on_dropped = metrics.count_dropped
    failed = keep_failed(bounded)
    flood(bounded, count, size_bytes, reason, name)
    stored = list(bounded.read())
    assert {letter.trace_id for letter in stored} >= failed
    assert all(record and record.state == "dead" for record in store.ledger.look_up(sorted(failed)))
    assert len(stored) - len(failed) <= MOST
    # The newest letter may exceed the limit.
    assert sum(letter.size_bytes for letter in stored) <= 2 * MB + size_bytes
    dropped = len(failed) + count - len(stored)
    assert dropped > 0
    assert store.dead_letters.dropped() == {reason: dropped}
    name_of_sample = "kp_scorer_dead_letters_dropped_total"
    assert metrics.registry.get_sample_value(name_of_sample, {"reason": reason}) == dropped


def test_one_producers_junk_can_push_out_anothers_junk_and_its_failures_anothers_failures(
    of_worker: redis.Redis, keys: Keys
) -> None:
    """A bound for each producer was rejected, because a producer could invent any number of names."""
    letters = DeadLetters(of_worker, keys, limited(MOST))
    letters.dead_letter(b"[]", DeadLettering("invalid", "$", "kp:trace:acme:1"))
    # Write twice the limit: letters of one millisecond are dropped in any order, and a fast machine writes several in one.
    flood(letters, 2 * MOST, 10, "invalid", "kp:trace:evil:{}")
    assert "kp:trace:acme:1" not in {letter.trace_id for letter in letters.read()}
    failed = keep_failed(letters)
    flood(letters, 2 * MOST, 10, "poison", "kp:trace:evil:{}")
    assert failed.isdisjoint(letter.trace_id for letter in letters.read())


def test_room_is_made_whatever_index_is_damaged(of_worker: redis.Redis, redis_client: redis.Redis, keys: Keys) -> None:
    letters = DeadLetters(of_worker, keys, limited(6))
    for damaged in (keys.dead_letter_sizes, keys.dead_rest, keys.dead_junk):
        flood(letters, 7, 10, "poison", "kp:trace:acme:{}")
        redis_client.delete(damaged)
        flood(letters, 14, 10, "poison", "kp:trace:acme:new{}")
        assert len(list(letters.read())) <= 12


def test_the_bound_follows_maxmemory(small: tuple[Store, Any]) -> None:
    store, admin = small
    admin.config_set("maxmemory", 40 * MB)
    flood(store.dead_letters, 30, MB, "malformed")
    assert sum(letter.size_bytes for letter in store.dead_letters.read()) <= 6 * MB


def test_room_for_submissions_comes_before_keeping_junk(small: tuple[Store, Any]) -> None:
    store, admin = small
    failed = keep_failed(store.dead_letters)
    flood(store.dead_letters, 20, MB, "malformed")
    submission = Submission("kp:trace:acme:new", DIGEST, b"{}")
    # Submissions are refused above nine tenths of this limit. The last tenth allows for buffers that Redis frees meanwhile.
    admin.config_set("maxmemory", admin.info("memory")["used_memory"])
    with pytest.raises(ServiceUnavailable, match="nearly full"):
        store.ledger.submit([submission])
    store.dead_letters.make_room()
    assert store.ledger.submit([submission]) == ["pending"]
    assert {letter.trace_id for letter in store.dead_letters.read()} >= failed
