"""The coverage gate on Redis: which traces it keeps, how they are erased and audited, and how workers share its facts."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pytest
import redis
from kp_scorer import SettingsError, score_traces
from kp_scorer.decider import Decider, open_gate
from kp_scorer.decision import Decision
from kp_scorer.decoding import check_late_outcome
from kp_scorer.gate import Gate
from kp_scorer.limits import Limits
from kp_scorer.novelty_meter import NoveltyMeter
from kp_scorer.offline import offline_decider
from kp_scorer.reviser import Reviser
from kp_scorer.settings import Settings, load_settings
from kp_scorer.store import Store
from kp_scorer.trace import ReasoningTrace, outcome_key

from tests.support.builders import Payload, make_trace, minimal_payload
from tests.support.changed_settings import with_changed
from tests.support.commands import command
from tests.support.gates import same_is_known
from tests.support.word_embedder import WordEmbedder

GATED: Final = {"routing.gate": "coverage", "embedding.embedder": "words"}
TASKS: Final = ("pay the invoice of May", "route the parcel to Rome", "close the oldest ticket")


def decider_on(store: Store, settings: Settings, **routing: object) -> Decider:
    """Return a worker's decider on this store, ready to decide."""
    settings = with_changed(settings, routing__gate="coverage", **{f"routing__{name}": each for name, each in routing.items()})
    embedder, window = WordEmbedder(), settings.novelty.window()
    meter, facts = NoveltyMeter(embedder, store.novelty_log(embedder.space), window), store.facts(embedder.space)
    gate = open_gate(settings.routing, settings.gate, meter, facts)
    assert gate
    store.ledger.facts = facts
    gate.catch_up()
    return Decider(store.ledger, settings.scoring, meter, max_attempts=5, gate=gate)


def trace(number: int, task: int = 0, **changed: Any) -> ReasoningTrace:
    return make_trace(trace_id=f"kp:trace:{number}", objective=TASKS[task], **changed)


def decide(decider: Decider, *traces: ReasoningTrace) -> list[Decision]:
    decisions = decider.decide(traces)
    assert all(isinstance(each, Decision) for each in decisions), decisions
    return [each for each in decisions if isinstance(each, Decision)]


def revise(decider: Decider, number: int, success: bool, outcome: int = 0) -> Decision:
    """Revise a trace's decision by a late outcome, as its worker does."""
    ledger: Any = decider.ledger
    assert decider.gate
    ledger.load_scripts()
    trace_id, outcome_id = f"kp:trace:{number}", f"kp:outcome:{number}-{outcome}-{success}"
    key = outcome_key(ledger.outcome_secret(), trace_id)
    late = {"@type": "LateOutcome", "id": outcome_id, "trace_id": trace_id, "success": success, "key": key}
    (revision,) = Reviser(ledger, decider.gate.policy, max_attempts=5).revise([check_late_outcome(late, Limits())], [None])
    assert isinstance(revision, Decision), revision
    return revision


def gate_of(decider: Decider) -> Gate:
    """Return the gate of a worker once it has read the newest facts, which idle workers do all the time."""
    decider.refresh()
    assert decider.gate
    return decider.gate


def outcomes(decisions: Sequence[Decision]) -> list[str]:
    return [each.outcome for each in decisions]


@pytest.fixture
def stores(settings: Settings) -> Iterator[tuple[Store, Store]]:
    with Store.open(settings) as first, Store.open(settings) as second:
        yield first, second


def test_workers_build_on_traces_that_others_kept_and_a_starting_worker_knows_the_same(
    stores: tuple[Store, Store], settings: Settings
) -> None:
    first, second = (decider_on(store, settings, bar=0.5) for store in stores)
    assert outcomes(decide(first, trace(0, success=False), trace(1), trace(2))) == ["rejected", "accepted", "rejected"]
    copy, different = decide(second, trace(3), trace(4, task=1))
    assert (copy.outcome, different.outcome) == ("rejected", "accepted")
    assert copy.gate
    assert copy.gate.nearest
    assert copy.gate.nearest.trace_id == "kp:trace:1"
    assert decide(first, trace(3)) == [copy]
    anew = decider_on(stores[0], settings)
    assert same_is_known(gate_of(first), gate_of(anew))
    assert same_is_known(gate_of(second), gate_of(anew))
    report = command(settings, "audit")
    assert report.exit_code == 0, report.output
    assert "gate: 5 agree, 0 differ, 0 undecided, 0 beyond" in report.stderr


def test_late_outcomes_change_what_is_kept(stores: tuple[Store, Store], settings: Settings) -> None:
    first, second = (decider_on(store, settings, bar=0.5) for store in stores)
    assert outcomes(decide(first, trace(0), trace(1, task=1, success=False))) == ["accepted", "rejected"]
    second.refresh()
    (facts,) = stores[0].all_facts()
    for _ in range(2):
        # Repeating a late outcome changes nothing.
        assert revise(second, 0, success=False).outcome == "rejected"
        assert revise(first, 1, success=True).outcome == "accepted"
        assert (len(list(facts.all())), len(list(facts.all_kept())), facts.info()["kept"]) == (4, 3, 1)
    # Another late outcome that says the same leads to another revision, but changes nothing that is kept.
    assert revise(first, 0, success=False, outcome=1).revision == 3
    assert len(list(facts.all())) == 4
    anew = decider_on(stores[0], settings, bar=0.5)
    for worker in (first, second):
        assert same_is_known(gate_of(worker), gate_of(anew))
        assert gate_of(worker).kept_count == 1
    again, copy = decide(second, trace(2), trace(3, task=1))
    assert (again.outcome, copy.outcome) == ("accepted", "rejected")
    assert copy.gate
    assert copy.gate.nearest
    assert copy.gate.nearest.trace_id == "kp:trace:1"
    # The first trace succeeds too late to keep out the one that took its place, so both are kept until they fail.
    assert [revise(first, 0, success, outcome=2).outcome for success in (True, False)] == ["accepted", "rejected"]
    assert revise(first, 2, success=False).outcome == "rejected"
    assert revise(first, 1, success=False).outcome == "rejected"
    assert facts.info()["kept"] == 0
    assert outcomes(decide(first, trace(4), trace(5, task=1))) == ["accepted", "accepted"]
    assert same_is_known(gate_of(first), gate_of(decider_on(stores[1], settings)))
    assert same_is_known(gate_of(first), gate_of(second))
    report = command(settings, "audit")
    assert report.exit_code == 0, report.output
    assert "gate: 6 agree, 0 differ, 0 undecided, 0 beyond" in report.stderr


def test_forgetting_a_revised_trace_erases_the_notes_on_it(store: Store, settings: Settings, redis_client: redis.Redis) -> None:
    decider = decider_on(store, settings, bar=0.5)
    assert outcomes(decide(decider, trace(0), trace(1, task=1, success=False), trace(2, task=2))) == [
        *("accepted", "rejected", "accepted")
    ]
    revise(decider, 0, success=False)
    revise(decider, 1, success=True)
    assert json.loads(command(settings, "cache", "info").stdout.splitlines()[-1])["kept"] == 2
    # Each trace has a vector in the novelty log and one in its fact. The fact of the second trace is stored twice.
    for trace_id, vectors in (("kp:trace:0", 2), ("kp:trace:1", 3)):
        assert json.loads(command(settings, "forget", trace_id).stdout)["vectors"] == vectors
    (facts,) = store.all_facts()
    for key in (facts.keys.log, facts.kept_keys.log):
        entries: Any = redis_client.xrange(key)
        assert [fields[b"i"] for _, fields in entries if b"i" in fields] == [b"kp:trace:2"]
    assert same_is_known(gate_of(decider), gate_of(decider_on(store, settings)))
    assert gate_of(decider).kept_count == 1
    cleared = command(settings, "cache", "clear", "--yes")
    assert "removed 1 kept traces" in cleared.output


@pytest.mark.parametrize("success", [True, False])
def test_an_outcome_that_comes_after_its_fact_has_gone_changes_nothing_that_is_kept(
    store: Store, settings: Settings, success: bool, redis_client: redis.Redis, keys: Any
) -> None:
    decider = decider_on(store, settings, bar=0.5)
    decide(decider, trace(0, success=not success), trace(1, task=1))
    (facts,) = store.all_facts()
    record, place = keys.record("kp:trace:0"), redis_client.hget(keys.record("kp:trace:1"), "fact")
    for number, damage in enumerate((b"garbage", place, b"1-1")):
        redis_client.hset(record, "fact", damage)
        assert revise(decider, 0, success, number).outcome == ("accepted" if success else "rejected")
        revise(decider, 0, not success, number)
        assert [len(list(facts.all())), facts.info()["kept"], gate_of(decider).kept_count] == [2, 2 - success, 2 - success]


def test_other_guards_hold_whatever_a_trace_adds(store: Store, settings: Settings) -> None:
    decider = decider_on(store, with_changed(settings, scoring__min_novelty=0.6), bar=0.1)
    assert outcomes(decide(decider, trace(0))) == ["accepted"]
    guarded, reviewed = decide(decider, trace(1), trace(2, task=1))
    assert (guarded.outcome, reviewed.outcome) == ("rejected", "accepted")


def test_traces_that_the_gate_rejects_may_go_to_review_by_their_score(store: Store, settings: Settings) -> None:
    decider = decider_on(store, with_changed(settings, scoring__review=0.1), bar=5.0)
    (decision,) = decide(decider, trace(0))
    assert (decision.outcome, decision.gate and decision.gate.accepts) == ("review", False)


def test_a_requirement_other_than_success(store: Store, settings: Settings) -> None:
    decider = decider_on(store, settings, requires=0.25)
    failure, doubt = decide(decider, trace(0, success=False, confidence=0.9), trace(1, task=1, confidence=0.2))
    assert [failure.outcome, doubt.outcome] == ["accepted", "rejected"]


def test_forgetting_erases_what_is_kept(stores: tuple[Store, Store], settings: Settings) -> None:
    first, second = (decider_on(store, settings, bar=0.5) for store in stores)
    assert outcomes(decide(first, trace(0), trace(1, task=1))) == ["accepted", "accepted"]
    second.refresh()
    assert command(settings, "forget", "kp:trace:0").exit_code == 0
    (facts,) = stores[0].all_facts()
    assert [each.fact.trace_id for each in (*facts.all(), *facts.all_kept()) if each.fact] == ["kp:trace:1"] * 2
    # After the erasure, no kept trace covers this task.
    assert outcomes(decide(second, trace(2))) == ["accepted"]
    assert same_is_known(gate_of(first), gate_of(second))
    assert command(settings, "audit").exit_code == 0


def test_an_audit_notices_a_decision_that_does_not_follow_from_the_facts(
    store: Store, settings: Settings, redis_client: redis.Redis, keys: Any
) -> None:
    decider = decider_on(store, settings, bar=0.5)
    (decision,) = decide(decider, trace(0))
    assert decision.gate
    changed = decision.model_copy(update={"gate": decision.gate.model_copy(update={"adds": 0.7})})
    redis_client.hset(keys.record(decision.trace_id), "decision", changed.model_dump_json())
    report = command(settings, "audit")
    assert report.exit_code == 1
    (differing,) = map(json.loads, report.stdout.splitlines())
    assert (differing["trace_id"], differing["gate"], differing["decided"]) == (decision.trace_id, "adds", 0.7)


def test_emptied_and_damaged_facts(store: Store, settings: Settings, redis_client: redis.Redis) -> None:
    decider = decider_on(store, settings, bar=0.5)
    decide(decider, trace(0))
    (facts,) = store.all_facts()
    assert facts.info() == {"space": WordEmbedder.space, "kept": 1, "bytes": facts.info()["bytes"]}
    (intact,) = (fact.packed() for each in facts.all() if (fact := each.fact))
    garbage: list[dict[Any, Any]] = [
        {"x": "y"},
        {"i": "", "d": "code", "f": "[\n]"},
        {"e": "never"},
        {"r": b"\xff"},
        {"i": "kp:trace:0", "r": "9-9"},
        {"i": b"\xff", "d": b"\xff", "f": b"\xff" * len(intact)},
    ]
    # This is the note of an erasure that never took place.
    garbage.append({"e": str(next(facts.all()).place)})
    for fields in garbage:
        redis_client.xadd(facts.keys.log, fields)
    assert outcomes(decide(decider, trace(1), trace(2, task=1))) == ["rejected", "accepted"]
    assert [bool(each.fact) for each in facts.all()] == [True, *[False] * 7, True, True]
    assert command(settings, "cache", "clear", "--yes").exit_code == 0
    assert outcomes(decide(decider, trace(3))) == ["accepted"]


def test_changing_the_share_or_the_requirement_leaves_kept_traces_kept(store: Store, settings: Settings) -> None:
    assert outcomes(decide(decider_on(store, settings, bar=0.5), trace(0))) == ["accepted"]
    for number, changed in enumerate(({"share": 0.5}, {"requires": 0.1}, {"bar": 0.9}), 1):
        (copy,) = decide(decider_on(store, settings, **changed), trace(number))
        assert copy.outcome == "rejected"


def test_another_space_begins_with_nothing(store: Store, settings: Settings) -> None:
    assert outcomes(decide(decider_on(store, settings, bar=0.5), trace(0))) == ["accepted"]
    gate = open_gate(
        settings.routing.model_copy(update={"gate": "coverage"}),
        settings.gate,
        NoveltyMeter(WordEmbedder(), store.novelty_log("other"), settings.novelty.window()),
        store.facts("other"),
    )
    assert gate
    gate.catch_up()
    assert gate.kept_count == 0


def lines(count: int) -> list[Payload]:
    return [
        minimal_payload(trace_id=f"kp:trace:{number}", objective=TASKS[number % 3], success=number % 4 != 0)
        for number in range(count)
    ]


def test_files_are_scored_by_the_same_gate_whatever_the_batches() -> None:
    payloads = lines(30)
    ways = [
        list(score_traces(payloads, load_settings({**GATED, "routing.share": 0.2, "worker.concurrency": batch})))
        for batch in (3, 96)
    ]
    assert outcomes(ways[0]) == outcomes(ways[1])
    assert Counter(outcomes(ways[0]))["accepted"] >= 3
    assert all(each.gate for each in ways[0])
    assert all(
        "gate" not in each.model_dump() for each in score_traces(payloads[:3], load_settings({"embedding.embedder": "words"}))
    )


def test_coverage_needs_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r'routing\.gate: "coverage" compares vectors'):
        load_settings({"routing.gate": "coverage", "embedding.embedder": "none"})
    monkeypatch.setattr("kp_scorer.offline.select_embedder", lambda *_: None)
    with pytest.raises(SettingsError, match=r"there is no embedder: set embedding\.embedder to words"):
        offline_decider(load_settings({"routing.gate": "coverage"}))
