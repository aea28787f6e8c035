"""The ledger apart from the states of a trace, which ``tests/model`` covers: ids, users, and counts of decisions."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis
from kp_scorer import rows, stored_decisions
from kp_scorer.cli.ids import resolve_trace_id
from kp_scorer.decider import Decider
from kp_scorer.decoding import check_late_outcome
from kp_scorer.errors import ServiceUnavailable, TraceDead
from kp_scorer.gate import GatePolicy
from kp_scorer.limits import Limits
from kp_scorer.reviser import Reviser
from kp_scorer.scoring import Policy
from kp_scorer.settings import Settings
from kp_scorer.store import Store, ledger_reader
from kp_scorer.store import ledger as ledger_module
from kp_scorer.store.keys import Keys
from kp_scorer.store.ledger import RedisLedger
from kp_scorer.store.records import Identity, Submission, SubmissionCounts, Verdict
from kp_scorer.store.scripts import Script, nothing

from tests.support.builders import decision_on, make_trace, store_decisions
from tests.support.changed_settings import settings_at
from tests.support.late_outcomes import late_outcome
from tests.support.traces import new_id

TTL_MS = 60_000
TRACE_ID = "kp:trace:one"
DIGEST = b"a" * 16
MOST_DOMAINS = 1_000


@pytest.fixture
def ledger(redis_client: redis.Redis, keys: Keys) -> RedisLedger:
    return RedisLedger(redis_client, keys, TTL_MS)


def submission() -> Submission:
    return Submission(TRACE_ID, DIGEST, b'{"id": "kp:trace:one"}')


def verdict(trace_id: str, domain: str = "code", guards: str = "", *, is_known: bool = True) -> Verdict:
    return Verdict(trace_id, DIGEST, decision_on(trace_id), "", domain, is_known, guards)


def test_a_resend_is_counted_also_while_redis_is_full(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys, limit_memory: Callable[[int], object]
) -> None:
    ledger.submit([submission()])
    limit_memory(1)
    ledger.count_resend(TRACE_ID)
    assert redis_client.hget(keys.record(TRACE_ID), "resends") == b"1"


def test_a_worker_does_not_hold_traces_that_it_finds_to_be_poison(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    trace, late = make_trace(), check_late_outcome(json.loads(late_outcome("a-secret-of-a-producer")), Limits())
    for identity in (Identity(trace.id, trace.digest()), Identity(late.id, late.digest())):
        ledger.acquire([identity])
        ledger.release([identity.trace_id])
        redis_client.hset(keys.record(identity.trace_id), "attempts", 5)
    (pending,) = Decider(ledger, Policy(), None, max_attempts=5).acquire([trace], alone=True)
    (end,) = Reviser(ledger, GatePolicy(share=0.1), max_attempts=5).revise([late], [None], alone=True)
    assert [each.reason for each in (pending.resolved, end) if isinstance(each, TraceDead)] == ["poison", "poison"]
    assert [redis_client.hget(keys.record(each.id), "owner") for each in (trace, late)] == [None, None]


def test_ids_are_found_by_their_beginning_whatever_characters_they_have(ledger: RedisLedger) -> None:
    ends = ["a", "ab", "a*", "a*b", "a?", "a[b]", "a\\", "b", "A", "team:ab", "team:langfuse:a*c", "ba"]
    ledger.acquire([Identity(f"kp:trace:{end}", DIGEST) for end in ends])
    for beginning in (*ends, "a[", "c"):
        matches = ledger.ids_beginning(beginning, 20)
        assert matches is not None
        owns = [end for end in ends if end.startswith(beginning) or end.split(":")[-1].startswith(beginning)]
        assert sorted(matches) == sorted(f"kp:trace:{own}" for own in owns)
    assert ledger.ids_beginning("team:l", 20) == ["kp:trace:team:langfuse:a*c"]
    assert len(ledger.ids_beginning("a", 2) or ()) == 2


@contextmanager
def store_without(command: str, redis_client: redis.Redis, settings: Settings) -> Iterator[Store]:
    """Open the store as a user who may do everything but one command."""
    redis_client.acl_setuser("limited", True, passwords=["+secret"], keys=["*"], categories=["+@all"], commands=[f"-{command}"])
    url = f"redis://limited:secret@{settings.redis.url.partition('@')[2]}"
    try:
        with Store.open(settings_at(url)) as store:
            yield store
    finally:
        redis_client.acl_deluser("limited")


def test_a_user_without_scan_resolves_only_the_ids_it_can_see(redis_client: redis.Redis, settings: Settings) -> None:
    with store_without("scan", redis_client, settings) as store:
        # This user sees one id with this beginning. There may be others that it cannot see, so the text is taken as it is.
        assert resolve_trace_id("abc", store.ledger, lambda: ["kp:trace:abc2"]) == "abc"
        assert resolve_trace_id("abc2", store.ledger, lambda: ["kp:trace:abc2"]) == "kp:trace:abc2"


def test_a_user_who_may_not_read_records_is_refused_and_does_not_learn_of_conflicts(
    redis_client: redis.Redis, settings: Settings
) -> None:
    refused = pytest.raises(ServiceUnavailable, match="Redis refuses")
    with store_without("hmget", redis_client, settings) as store, refused:
        store.ledger.submit([submission()])


def test_a_decided_trace_is_counted_though_redis_refuses_to_trim_the_facts(
    redis_client: redis.Redis, settings: Settings
) -> None:
    with store_without("xtrim", redis_client, settings) as store:
        store.ledger.facts = store.facts("space")
        store.ledger.submit([submission()])
        for _ in range(2):
            with suppress(ServiceUnavailable):
                store.ledger.commit([verdict(TRACE_ID)._replace(fact=b"fact")])
        assert store.ledger.counts() == SubmissionCounts(submitted=1, pending=0, decided=1, dead=0)


def keep(store: Store, count: int) -> set[str]:
    """Store ``count`` decisions in the ledger; return the ids of their traces."""
    decisions = {trace_id: decision_on(trace_id) for trace_id in (f"kp:trace:{number}" for number in range(count))}
    store_decisions(store, decisions, DIGEST)
    return set(decisions)


def test_every_stored_decision_is_read_as_it_was_made(settings: Settings, store: Store) -> None:
    trace_ids = keep(store, 5)
    # A pending trace has no decision.
    store.ledger.acquire([Identity("kp:trace:pending", DIGEST)])
    decisions = list(stored_decisions(settings))
    assert {decision.trace_id for decision in decisions} == trace_ids
    assert {decision.model_dump_json().encode() for decision in decisions} == {decision_on(trace_id) for trace_id in trace_ids}
    assert {row.trace_id for row in rows(decisions)} == trace_ids


def store_all(ledger: RedisLedger, *domains: str, is_known: bool = False) -> None:
    """Store a decision in each domain, by default in domains that no settings name."""
    committed = ledger.commit([verdict(new_id(), domain, is_known=is_known) for domain in domains])
    assert committed == ["stored"] * len(domains)


def test_domains_are_counted_as_they_are_written(ledger: RedisLedger) -> None:
    names = ("decided", "names", "a b", ">", "\u00e9", "\ud55c\uad6d\uc5b4")
    store_all(ledger, *names, "a b")
    assert ledger.tallies().domains == {"a b": 2} | dict.fromkeys(sorted(set(names) - {"a b"}), 1)


def test_invented_domains_beyond_the_limit_share_one_field(ledger: RedisLedger, redis_client: redis.Redis, keys: Keys) -> None:
    invented = [f"invented {number}" for number in range(MOST_DOMAINS + 200)]
    store_all(ledger, *invented)
    length: Any = redis_client.hlen(keys.tallies)
    # Domains that have been counted keep their fields, and domains that the settings name always get one.
    store_all(ledger, *invented[-50:], "invented 0")
    store_all(ledger, "code", "code", is_known=True)
    domains = ledger.tallies().domains
    assert len(domains) == MOST_DOMAINS + 2
    assert list(domains.items())[:2] == [("", 250), ("code", 2)]
    assert domains["invented 0"] == 2
    assert redis_client.hlen(keys.tallies) == length + 1


def test_a_key_of_another_type_is_named_before_anything_is_stored(
    ledger: RedisLedger, redis_client: redis.Redis, keys: Keys
) -> None:
    redis_client.set(keys.tallies, "a neighbour's")
    with pytest.raises(ServiceUnavailable, match=f"WRONGTYPE {keys.tallies}"):
        store_all(ledger, "code", is_known=True)
    assert ledger.counts().decided == 0
    redis_client.delete(keys.tallies)


def test_each_guard_that_fired_counts_once_a_decision(ledger: RedisLedger) -> None:
    first, *others = (verdict(new_id(), guards=guards) for guards in ("copies max_confidence", "max_confidence", ""))
    ledger.commit([first, *others])
    ledger.commit([first])
    assert ledger.tallies().guards == {"max_confidence": 2, "copies": 1}


KEYS = Keys("kp")


def _count_resend(*, keys: Keys, record: str, trace: str) -> None: ...


def _erase_records(*, keys: Verdict, records: Sequence[str], trace_ids: Sequence[str]) -> None: ...


@pytest.mark.parametrize("function", [_count_resend, _erase_records])
def test_declaration_with_other_names_than_its_file_fails(function: Callable[..., None]) -> None:
    with pytest.raises(TypeError, match=rf"^{function.__name__[1:]}\.lua has .*, its function has "):
        Script(function, nothing)


def test_call_loads_a_script_that_redis_does_not_have(redis_client: redis.Redis) -> None:
    redis_client.script_flush()
    assert ledger_reader._counts(redis_client, keys=KEYS) == SubmissionCounts(0, 0, 0, 0)


def test_the_script_of_clients_is_loaded_only_if_redis_does_not_have_it(redis_client: redis.Redis) -> None:
    redis_client.script_flush()
    ledger = RedisLedger(redis_client, KEYS, ttl_ms=60_000)
    calls = []
    for _ in range(2):
        redis_client.config_resetstat()
        ledger.load_scripts()
        calls.append("cmdstat_script|load" in redis_client.info("commandstats") or _script_calls(redis_client) > 1)
    assert redis_client.script_exists(ledger_module._submit.sha) == [True]
    assert calls == [True, False]


def _script_calls(redis_client: redis.Redis) -> int:
    """Return the number of calls of SCRIPT. Redis 6.2 counts its subcommands together."""
    return int(redis_client.info("commandstats").get("cmdstat_script", {}).get("calls", 0))
