"""Deciding batches against a ledger and a log in memory, with an embedder small enough to reason about."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decider import Decider, NoveltyMeter, Settled
from kp_scorer.decision import Decision
from kp_scorer.decoding import decode_trace
from kp_scorer.errors import TraceConflict
from kp_scorer.novelty import MemoryLog, Window
from kp_scorer.scoring import PROFILES, Policy
from kp_scorer.store import Committed, MemoryLedger, Tally, Verdict
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import LIMITS, make_trace, minimal_payload, step, steps
from tests.support.word_embedder import WordEmbedder

WINDOW: Final = Window(max_elements=1_000, ttl_ms=60_000, slack_elements=1_000, slack_ms=60_000)
WORDS: Final = ("invoice", "ledger", "route", "parcel", "dose", "ticket")


def make_decider(
    embedder: WordEmbedder | None = None,
    policy: Policy | None = None,
    ledger: MemoryLedger | None = None,
    window: Window = WINDOW,
    clock_ms: Callable[[], int] = lambda: 1_000,
) -> Decider:
    embedder = embedder or WordEmbedder()
    novelty = NoveltyMeter(embedder, MemoryLog(window, clock_ms), window)
    return Decider(ledger or MemoryLedger(), policy or Policy(), novelty, max_attempts=5)


def decide_one(decider: Decider, trace: ReasoningTrace) -> Decision:
    (decided,) = decider.decide([trace])
    assert isinstance(decided, Decision)
    return decided


def trace_about(objective: str, trace_id: str = "kp:trace:one", **overrides: Any) -> ReasoningTrace:
    return make_trace(objective=objective, trace_id=trace_id, **overrides)


def without_timings(decided: Sequence[Settled]) -> list[object]:
    return [
        item.model_dump(exclude={"timings", "decided_at"}) if isinstance(item, Decision) else (type(item), item.trace_id)
        for item in decided
    ]


def test_first_trace_meets_an_empty_cache() -> None:
    decision = decide_one(make_decider(), trace_about("invoice"))
    assert decision.novelty.source == "empty_cache"
    assert decision.dimensions.novelty == 0.5
    assert (decision.novelty.nearest, decision.novelty.duplicate_of) == (None, None)


def test_same_content_under_another_id_is_not_new() -> None:
    decider = make_decider()
    decide_one(decider, trace_about("invoice"))
    decision = decide_one(decider, trace_about("invoice", "kp:trace:two"))
    assert decision.dimensions.novelty == 0.0
    assert decision.novelty.duplicate_of == "kp:trace:one"
    assert decision.novelty.nearest is not None
    assert (decision.novelty.nearest.trace_id, decision.novelty.nearest.similarity) == ("kp:trace:one", 1.0)


def test_same_text_with_another_outcome_is_not_new_and_no_duplicate() -> None:
    decider = make_decider()
    decide_one(decider, trace_about("invoice"))
    decision = decide_one(decider, trace_about("invoice", "kp:trace:two", success=False))
    assert decision.dimensions.novelty == 0.0
    assert decision.novelty.duplicate_of is None


def test_novelty_is_one_minus_the_similarity_to_the_nearest_earlier_trace() -> None:
    embedder = WordEmbedder()
    decider = make_decider(embedder)
    objectives = ["invoice ledger route", "parcel dose ticket", "invoice ledger parcel"]
    *_, last = [
        decide_one(decider, trace_about(objective, f"kp:trace:{objective[:3]}{n}")) for n, objective in enumerate(objectives)
    ]
    first, second, own = embedder.embed(objectives)
    similarities = [float(first @ own), float(second @ own)]
    assert max(similarities) not in (0.0, 1.0)
    assert last.novelty.nearest is not None
    assert last.novelty.nearest.similarity == max(similarities)
    assert last.novelty.nearest.trace_id == ["kp:trace:inv0", "kp:trace:par1"][int(np.argmax(similarities))]
    assert last.dimensions.novelty == 1.0 - max(similarities)


def test_novelty_stops_at_one_where_the_nearest_trace_is_opposite() -> None:
    words = [f"word{number}" for number in range(50)]
    first, *others = WordEmbedder().embed(words)
    opposite = next(word for word, vector in zip(words[1:], others, strict=True) if float(first @ vector) < 0)
    decider = make_decider()
    decide_one(decider, trace_about(words[0]))
    decision = decide_one(decider, trace_about(opposite, "kp:trace:two"))
    assert decision.novelty.nearest is not None
    assert decision.novelty.nearest.similarity < 0
    assert decision.dimensions.novelty == 1.0


def test_same_trace_again_gets_the_stored_decision() -> None:
    embedder = WordEmbedder()
    decider = make_decider(embedder)
    first = decide_one(decider, trace_about("invoice"))
    decide_one(decider, trace_about("route", "kp:trace:two"))
    assert decide_one(decider, trace_about("invoice")) == first
    assert len(embedder.texts) == 2


def test_stored_decision_outlives_the_policy_it_was_made_by() -> None:
    ledger = MemoryLedger()
    first = decide_one(make_decider(ledger=ledger, policy=Policy(threshold=0.1)), trace_about("invoice"))
    again = decide_one(make_decider(ledger=ledger, policy=Policy(threshold=0.9)), trace_about("invoice"))
    assert first.outcome == "accepted"
    assert again == first


def test_other_content_under_a_decided_id_is_a_conflict() -> None:
    decider = make_decider()
    first = decide_one(decider, trace_about("invoice"))
    (conflict,) = decider.decide([trace_about("route")])
    assert isinstance(conflict, TraceConflict)
    assert conflict.trace_id == "kp:trace:one"
    assert decide_one(decider, trace_about("invoice")) == first


def test_other_content_under_an_id_of_the_same_batch_is_a_conflict() -> None:
    decider = make_decider()
    first, conflict, other = decider.decide([trace_about("invoice"), trace_about("route"), trace_about("dose", "kp:trace:two")])
    assert isinstance(first, Decision)
    assert isinstance(conflict, TraceConflict)
    assert isinstance(other, Decision)
    assert other.novelty.nearest is not None
    assert other.novelty.nearest.trace_id == "kp:trace:one"


def test_conflict_does_not_enter_the_cache() -> None:
    decider = make_decider()
    decide_one(decider, trace_about("invoice"))
    decider.decide([trace_about("route")])
    later = decide_one(decider, trace_about("route", "kp:trace:two"))
    assert later.novelty.duplicate_of is None
    assert later.dimensions.novelty > 0.0


def test_same_trace_twice_in_a_batch_gets_one_decision() -> None:
    first, second = make_decider().decide([trace_about("invoice"), trace_about("invoice")])
    assert isinstance(first, Decision)
    assert second == first
    assert first.novelty.source == "empty_cache"


def test_two_identical_traces_in_a_batch_are_one_new_and_one_not() -> None:
    first, second = make_decider().decide([trace_about("invoice"), trace_about("invoice", "kp:trace:two")])
    assert isinstance(first, Decision)
    assert isinstance(second, Decision)
    assert (first.dimensions.novelty, second.dimensions.novelty) == (0.5, 0.0)


def test_one_text_is_embedded_once_a_batch() -> None:
    embedder = WordEmbedder()
    make_decider(embedder).decide([trace_about("invoice", f"kp:trace:{number}") for number in range(3)])
    assert len(embedder.texts) == 1


def test_digest_but_not_time_stamp_makes_a_trace_the_same() -> None:
    decider = make_decider()
    first = decide_one(decider, trace_about("invoice"))
    payload = minimal_payload(trace_id="kp:trace:one", objective="invoice")
    payload["metadata"] |= {"created_at": "2031-01-01T00:00:00Z", "quality_score": 1.0}
    assert decide_one(decider, decode_trace(payload, LIMITS)) == first


@pytest.mark.parametrize(("max_elements", "counts"), [(2, False), (3, True)])
def test_only_so_many_newest_traces_count(max_elements: int, counts: bool) -> None:
    decider = make_decider(window=replace(WINDOW, max_elements=max_elements))
    for number, objective in enumerate(("invoice", "route", "dose")):
        decide_one(decider, trace_about(objective, f"kp:trace:{number}"))
    duplicate = decide_one(decider, trace_about("invoice", "kp:trace:late")).novelty.duplicate_of
    assert duplicate == ("kp:trace:0" if counts else None)


@pytest.mark.parametrize(("age_ms", "counts"), [(59_999, True), (60_000, False)])
def test_only_traces_younger_than_the_ttl_count(age_ms: int, counts: bool) -> None:
    times_ms = iter([1_000, 1_000 + age_ms])
    decider = make_decider(clock_ms=lambda: next(times_ms))
    decide_one(decider, trace_about("invoice"))
    late = decide_one(decider, trace_about("invoice", "kp:trace:late"))
    assert late.novelty.source == ("embedding" if counts else "empty_cache")


def test_no_traces_get_no_decisions() -> None:
    assert make_decider().decide([]) == []


def test_without_a_novelty_meter_every_novelty_is_unknown() -> None:
    decider = Decider(MemoryLedger(), Policy(), None, max_attempts=5)
    decided = decider.decide([trace_about("invoice"), trace_about("invoice", "kp:trace:two"), trace_about("route")])
    assert [item.novelty.model_dump(exclude_none=True) for item in decided if isinstance(item, Decision)] == [
        {"source": "no_embedder"},
        {"source": "no_embedder"},
    ]
    assert [item.dimensions.novelty for item in decided if isinstance(item, Decision)] == [0.5, 0.5]
    assert isinstance(decided[2], TraceConflict)


def test_decision_carries_every_part_of_itself() -> None:
    policy = Policy(thresholds={"code": 0.3})
    trace = trace_about(
        "invoice", domain="code", confidence=0.8, steps=[step("tool_call", "sql"), *steps("observation", "thought")]
    )
    decision = decide_one(make_decider(policy=policy), trace)
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


def test_decision_does_not_carry_content() -> None:
    trace = trace_about("QZXJ objective", steps=[step("thought", content="QZXJ said"), step("tool_call", "QZXJ-tool")])
    assert "QZXJ" not in decide_one(make_decider(), trace).model_dump_json()


def test_threshold_is_inclusive() -> None:
    score = decide_one(make_decider(), trace_about("invoice")).score
    at = decide_one(make_decider(policy=Policy(threshold=score)), trace_about("invoice"))
    above = decide_one(make_decider(policy=Policy(threshold=math.nextafter(score, 1.0))), trace_about("invoice"))
    assert (at.outcome, above.outcome) == ("accepted", "rejected")
    assert above.threshold_source == "default"


def test_a_trace_below_the_threshold_goes_to_review_from_the_score_that_says_so() -> None:
    score = decide_one(make_decider(), trace_about("invoice")).score
    at = decide_one(make_decider(policy=Policy(threshold=1.0, review=score)), trace_about("invoice"))
    below = decide_one(make_decider(policy=Policy(threshold=1.0, review=math.nextafter(score, 1.0))), trace_about("invoice"))
    assert (at.outcome, at.review) == ("review", score)
    assert below.outcome == "rejected"
    assert decide_one(make_decider(), trace_about("invoice")).review is None


def test_rejected_trace_enters_the_cache_too() -> None:
    decider = make_decider(policy=Policy(threshold=1.0))
    assert decide_one(decider, trace_about("invoice")).outcome == "rejected"
    assert decide_one(decider, trace_about("invoice", "kp:trace:two")).dimensions.novelty == 0.0


class Watched(MemoryLedger):
    """Remembers what it was given to count."""

    def __init__(self) -> None:
        super().__init__()
        self.tallies: list[Tally] = []
        self.comparison = ""

    def commit(self, verdicts: Sequence[Verdict], comparison: str = "") -> list[Committed]:
        self.tallies += [verdict.tally for verdict in verdicts]
        self.comparison = comparison
        return super().commit(verdicts)


def decided_beside(shadow: Policy | None, live: Policy, *domains: str) -> tuple[list[object], Watched]:
    """Decisions on a trace of each domain, and the ledger that was to count them."""
    ledger = Watched()
    traces = [trace_about(f"{word} of {domain}", f"kp:trace:{word}", domain=domain) for word, domain in zip(WORDS, domains)]  # noqa: B905
    return without_timings(Decider(ledger, live, None, max_attempts=5, shadow=shadow).decide(traces)), ledger


def test_a_shadow_is_compared_and_changes_nothing() -> None:
    live = Policy(threshold=0.1, aliases={"Finance": "finance"})
    domains = ("code", "Finance", "finanse")
    alone, ledger = decided_beside(None, live, *domains)
    assert ledger.comparison == ""
    assert ledger.tallies == [Tally("code", is_known=True), Tally("Finance", is_known=True), Tally("finanse", is_known=False)]
    beside, ledger = decided_beside(Policy(threshold=1.0, thresholds={"code": 0.1}, review=0.1), live, *domains)
    assert beside == alone
    assert [tally.outcomes for tally in ledger.tallies] == ["accepted>accepted", "accepted>review", "accepted>review"]


def test_comparisons_of_other_policies_have_other_names() -> None:
    live, shadow, other = Policy(), Policy(threshold=0.6), Policy(threshold=0.5)
    names = {decided_beside(two, one, "code")[1].comparison for one, two in ((live, shadow), (live, other), (other, shadow))}
    assert len(names) == 3
    assert decided_beside(shadow, live, "code")[1].comparison in names


SUBMISSIONS: Final = st.builds(
    lambda number, words: trace_about(" ".join(words), f"kp:trace:{number}"),
    st.integers(0, 7),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
)


@given(st.lists(SUBMISSIONS, max_size=12), st.lists(st.integers(1, 5), min_size=12, max_size=12), st.integers(1, 6))
def test_batches_decide_as_one_by_one(traces: list[ReasoningTrace], sizes: list[int], max_elements: int) -> None:
    window = Window(max_elements, ttl_ms=60_000, slack_elements=50, slack_ms=60_000)
    alone, batching = make_decider(window=window), make_decider(window=window)
    one_by_one = [decided for trace in traces for decided in alone.decide([trace])]
    batched: list[Settled] = []
    for size in sizes:
        batched += batching.decide(traces[len(batched) : len(batched) + size])
    assert without_timings(batched) == without_timings(one_by_one)
