"""Deciding against a ledger and a log in memory: batches decide as their traces would one by one.

The share of traces that is sampled for review depends on nothing that a producer chooses, and anyone can recompute it.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decider import Decider, Resolved
from kp_scorer.decision import Decision
from kp_scorer.errors import TraceConflict
from kp_scorer.novelty import Window
from kp_scorer.scoring import PROFILES, Policy, decide_again
from kp_scorer.store.records import Committed, MemoryLedger, Verdict
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import make_trace, step, steps
from tests.support.word_embedder import WordEmbedder, decide_one, word_decider

WORDS: Final = ("invoice", "ledger", "route", "parcel", "dose", "ticket")


def trace_about(objective: str, trace_id: str = "kp:trace:one", **overrides: Any) -> ReasoningTrace:
    return make_trace(objective=objective, trace_id=trace_id, **overrides)


def without_timings(decided: Sequence[Resolved]) -> list[object]:
    return [
        item.model_dump(exclude={"timings", "decided_at"}) if isinstance(item, Decision) else (type(item), item.trace_id)
        for item in decided
    ]


@pytest.mark.parametrize(("overrides", "duplicate_of"), [({}, "kp:trace:one"), ({"success": False}, None)])
def test_the_same_text_under_another_id_is_not_new_and_the_same_content_a_duplicate(
    overrides: dict[str, Any], duplicate_of: str | None
) -> None:
    decider = word_decider(Policy(threshold=1.0))
    assert decide_one(decider, trace_about("invoice")).outcome == "rejected", "a rejected trace enters the cache, too"
    decision = decide_one(decider, trace_about("invoice", "kp:trace:two", **overrides))
    assert decision.dimensions.novelty == 0.0
    assert decision.novelty.duplicate_of == duplicate_of
    assert decision.novelty.nearest is not None
    assert (decision.novelty.nearest.trace_id, decision.novelty.nearest.similarity) == ("kp:trace:one", 1.0)


def test_novelty_is_one_minus_the_similarity_to_the_nearest_earlier_trace() -> None:
    decider = word_decider()
    objectives = ["invoice ledger route", "parcel dose ticket", "invoice ledger parcel"]
    *_, last = (decide_one(decider, trace_about(each, f"kp:trace:{number}")) for number, each in enumerate(objectives))
    first, second, own = WordEmbedder().embed(objectives)
    similarities = [float(first @ own), float(second @ own)]
    assert max(similarities) not in (0.0, 1.0)
    assert last.novelty.nearest is not None
    assert last.novelty.nearest.similarity == max(similarities)
    assert last.novelty.nearest.trace_id == f"kp:trace:{np.argmax(similarities)}"
    assert last.dimensions.novelty == 1.0 - max(similarities)


def test_a_trace_decided_again_keeps_its_decision_whatever_the_policy_is_now() -> None:
    embedder, ledger = WordEmbedder(), MemoryLedger()
    decider = word_decider(Policy(threshold=0.1), embedder=embedder, ledger=ledger)
    first = decide_one(decider, trace_about("invoice"))
    decide_one(decider, trace_about("route", "kp:trace:two"))
    stricter = word_decider(Policy(threshold=0.9), embedder=embedder, ledger=ledger)
    assert first.outcome == "accepted"
    assert [decide_one(each, trace_about("invoice")) for each in (decider, stricter)] == [first, first]
    assert len(embedder.texts) == 2


def test_other_content_under_a_decided_id_is_a_conflict_and_stays_out_of_the_log() -> None:
    decider = word_decider()
    first = decide_one(decider, trace_about("invoice"))
    (conflict,) = decider.decide([trace_about("route")])
    assert isinstance(conflict, TraceConflict)
    assert conflict.trace_id == "kp:trace:one"
    assert decide_one(decider, trace_about("invoice")) == first
    later = decide_one(decider, trace_about("route", "kp:trace:two"))
    assert later.novelty.duplicate_of is None
    assert later.dimensions.novelty > 0.0


def test_decision_carries_every_part_of_itself() -> None:
    policy = Policy(thresholds={"code": 0.3})
    trace = trace_about(
        "invoice", domain="code", confidence=0.8, steps=[step("tool_call", "sql"), *steps("observation", "thought")]
    )
    metadata = {"agent_id": "kp:agent:clerk", "framework": "f" * 201, "visibility": "org", "privacy_level": "private"}
    trace = trace.model_copy(update={"metadata": trace.metadata.model_copy(update=metadata)})
    decision = decide_one(word_decider(policy), trace)
    composite = 0.2 * (0.375 + 0.03) + 0.3 * 0.5 + 0.3 * 1.0 + 0.2 * 0.8
    assert decision.schema_version == 1
    assert (decision.trace_id, decision.domain, decision.profile) == ("kp:trace:one", "code", "code")
    assert decision.weights == PROFILES["code"]
    assert decision.composite == pytest.approx(composite)
    assert [override.name for override in decision.overrides] == ["single_tool"]
    assert decision.overrides[0].score == pytest.approx(composite - 0.1)
    assert decision.score == decision.overrides[-1].score
    assert (decision.outcome, decision.threshold, decision.threshold_source) == ("accepted", 0.3, "domain")
    assert (decision.novelty.embedder, decision.novelty.space, decision.novelty.entry) == ("words", "words-1", "1000-1")
    assert decision.timings.batch_size == 1
    assert min(decision.timings.look_up_ms, decision.timings.embed_ms, decision.timings.place_ms) >= 0.0
    assert decision.decided_at.endswith("+00:00")
    assert (decision.agent_id, decision.visibility, decision.privacy_level) == ("kp:agent:clerk", "org", "private")
    assert decision.framework is None, "it is too long"


def test_decision_does_not_carry_content() -> None:
    trace = trace_about("QZXJ objective", steps=[step("thought", content="QZXJ content"), step("tool_call", "QZXJ-tool")])
    assert "QZXJ" not in decide_one(word_decider(), trace).model_dump_json()


def test_decisions_count_by_domain_and_whether_the_policy_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, tallies = MemoryLedger(), list[tuple[str, bool]]()
    commit = ledger.commit

    def tallied(verdicts: Sequence[Verdict]) -> list[Committed]:
        tallies.extend((verdict.domain, verdict.is_known) for verdict in verdicts)
        return commit(verdicts)

    monkeypatch.setattr(ledger, "commit", tallied)
    domains = ("code", "Finance", "finanse")
    traces = [trace_about("invoice", f"kp:trace:{domain}", domain=domain) for domain in domains]
    Decider(ledger, Policy(aliases={"Finance": "finance"}), None, max_attempts=5).decide(traces)
    assert tallies == [("code", True), ("Finance", True), ("finanse", False)]


SUBMISSIONS: Final = st.builds(
    lambda number, words: trace_about(" ".join(words), f"kp:trace:{number}"),
    st.integers(0, 7),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
)


@given(st.lists(SUBMISSIONS, max_size=12), st.lists(st.integers(1, 5), min_size=12, max_size=12), st.integers(1, 6))
def test_batches_decide_like_single_traces(traces: list[ReasoningTrace], sizes: list[int], max_elements: int) -> None:
    window = Window(max_elements, ttl_ms=60_000, slack_elements=50, slack_ms=60_000)
    alone, batching = word_decider(window=window), word_decider(window=window)
    one_by_one = [decided for trace in traces for decided in alone.decide([trace])]
    batched: list[Resolved] = []
    for size in sizes:
        batched += batching.decide(traces[len(batched) : len(batched) + size])
    assert without_timings(batched) == without_timings(one_by_one)


def decide_sampling(sample: float, count: int, *, is_embedding: bool) -> list[Decision]:
    without = Decider(MemoryLedger(), Policy(), None, max_attempts=5, sample=sample)
    decider = word_decider(sample=sample) if is_embedding else without
    resolved = decider.decide([make_trace(trace_id=f"kp:trace:{number}") for number in range(count)])
    assert decider.decide([make_trace(trace_id="kp:trace:0")]) == resolved[:1]
    return [each for each in resolved if isinstance(each, Decision)]


@pytest.mark.parametrize("is_embedding", [True, False])
def test_the_place_decides_or_the_id_of_what_has_none_and_anybody_can_check_it(is_embedding: bool) -> None:
    for decision in (decisions := decide_sampling(0.3, 100, is_embedding=is_embedding)):
        text = decision.novelty.entry if is_embedding else decision.trace_id
        assert text is not None
        # Digests are uniformly distributed, so this comparison samples the given share.
        number = int(hashlib.blake2b(text.encode(), digest_size=6).hexdigest(), 16) / 2**48
        assert decision.sampled == (0.3 if number < 0.3 else None)
        assert Decision.model_validate_json(decision.model_dump_json()) == decision
        assert decide_again(decision, Policy(threshold=0.1)).sampled == decision.sampled
    assert {decision.sampled for decision in decisions} == {0.3, None}
    assert all(decision.sampled == 1 for decision in decide_sampling(1.0, 20, is_embedding=is_embedding))
