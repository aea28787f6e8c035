"""Guards against traces made for their score: a ceiling for stated confidence, a floor for novelty, no copies."""

from collections.abc import Sequence
from typing import Any

import pytest
from kp_scorer.decision import Decision, Guard
from kp_scorer.report.calibration import calibrate_samples, samples_of
from kp_scorer.report.explanation import decided_words, terms_of
from kp_scorer.report.phrases import why
from kp_scorer.report.suggestion import Target
from kp_scorer.report.summary import analyse
from kp_scorer.report.text import text
from kp_scorer.scoring import Policy, decide_again
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import decided, make_trace
from tests.support.word_embedder import word_decider

ACCEPT_ALL = 0.0


def decide(policy: Policy, *traces: ReasoningTrace, names_nearest: bool = True) -> list[Decision]:
    resolved = word_decider(policy, names_nearest=names_nearest).decide(traces)
    return [decision for decision in resolved if isinstance(decision, Decision)]


def traces_about(*objectives: str, domain: str = "code", **overrides: Any) -> list[ReasoningTrace]:
    return [
        make_trace(objective=objective, trace_id=f"kp:trace:{number}", domain=domain, **overrides)
        for number, objective in enumerate(objectives)
    ]


def outcomes(decisions: Sequence[Decision]) -> list[str]:
    return [decision.outcome for decision in decisions]


def test_a_copy_is_rejected_whatever_its_score_and_no_change_makes_it_pass() -> None:
    *others, copy = decide(Policy(threshold=ACCEPT_ALL, copies="reject"), *traces_about("invoice", "parcel", "invoice"))
    assert [(decision.outcome, decision.guards[0].fired) for decision in others] == [("accepted", False)] * 2
    assert (copy.outcome, copy.guards[0].fired) == ("rejected", True)
    assert {term.least for term in terms_of(copy)} == {None}
    assert list(decided_words(copy, {}))[1] == "A guard rejects it whatever its score: scoring.copies."
    assert why(copy).startswith("guard copies, ")


def test_without_an_embedder_no_floor_of_novelty_rejects() -> None:
    decision = decided(make_trace(), Policy(threshold=ACCEPT_ALL, min_novelty=0.9, copies="reject"))
    assert (decision.outcome, decision.dimensions.novelty) == ("accepted", 0.5)


@pytest.mark.parametrize("domain", ["medical", "an alias"])
def test_the_floor_of_a_domain_replaces_the_general_one(domain: str) -> None:
    policy = Policy(threshold=ACCEPT_ALL, min_novelty=0.9, min_novelties={"medical": 0.01}, aliases={"an alias": "medical"})
    assert outcomes(decide(policy, *traces_about("invoice", "invoice ledger", domain=domain))) == ["accepted"] * 2
    # The first trace in an empty log passes.
    assert outcomes(decide(policy, *traces_about("invoice", "invoice ledger"))) == ["accepted", "rejected"]


@pytest.mark.parametrize(("success", "counted"), [(True, 0.6), (False, 0.6 * 0.3)])
def test_stated_confidence_counts_up_to_the_ceiling(success: bool, counted: float) -> None:
    decision = decided(make_trace(confidence=0.9, success=success), Policy(max_confidence=0.6))
    assert decision.dimensions.outcome_confidence == counted
    assert decision.guards == (Guard(name="max_confidence", bound=0.6, fired=True),)
    below = decided(make_trace(confidence=0.5), Policy(max_confidence=0.6))
    assert (below.dimensions.outcome_confidence, below.guards[0].fired) == (0.5, False)
    assert Decision.model_validate_json(decision.model_dump_json()) == decision


def test_deciding_again_applies_the_other_policys_guards() -> None:
    plain = Policy(threshold=ACCEPT_ALL)
    *_, copy = decide(plain, *traces_about("invoice", "invoice"))
    assert decide_again(copy, Policy(threshold=ACCEPT_ALL, min_novelty=0.1)).outcome == "rejected"
    guarded = decide_again(copy, Policy(threshold=ACCEPT_ALL, copies="reject"))
    assert guarded.outcome == "rejected"
    assert decide_again(guarded, plain) == copy


def test_a_copy_stays_one_where_decisions_do_not_name_others() -> None:
    policy = Policy(threshold=ACCEPT_ALL, copies="reject")
    *_, copy = decide(policy, *traces_about("invoice", "invoice"), names_nearest=False)
    assert (copy.novelty.duplicate_of, copy.outcome) == (None, "rejected")
    assert decide_again(copy, policy) == copy


def test_an_explanation_names_the_guard_and_the_change_that_would_pass_it() -> None:
    policy = Policy(threshold=0.3, min_novelty=0.6, max_confidence=0.8)
    *_, near = decide(policy, *traces_about("invoice", "invoice ledger"))
    lines = list(decided_words(near, {near.trace_id: make_trace(objective="invoice ledger")}))
    assert lines[1] == "A guard rejects it whatever its score: scoring.min_novelty of 0.6000."
    assert "      confidence 1.0000, of which 0.8000 counts, x 1, as it succeeded" in lines
    least = {term.dimension: term.least for term in terms_of(near)}
    assert least["novelty"] == pytest.approx(0.6)
    assert least["complexity"] is None


def decisions_with_copies(accept: Policy) -> list[Decision]:
    """Return the decisions on two hundred traces of one domain, a quarter of which are copies."""
    objectives = [f"task {number if number % 4 else 0}" for number in range(200)]
    return decide(accept, *traces_about(*objectives))


def test_calibration_accepts_nothing_that_a_guard_rejects() -> None:
    decisions = decisions_with_copies(Policy(copies="reject"))
    assert {decision.is_guarded for decision in decisions} == {True, False}
    unguarded = 1 - sum(decision.is_guarded for decision in decisions) / len(decisions)
    samples = samples_of(((decision, None) for decision in decisions), {})
    # The guard rejects copies at any threshold, so no threshold accepts 90% of the traces.
    cohort = calibrate_samples(samples, Target("accept", 0.9)).domains["code"]
    assert (cohort.suggestion, cohort.lack) == (None, "out_of_reach")
    suggestion = calibrate_samples(samples, Target("accept", 0.5)).domains["code"].suggestion
    assert suggestion
    policy = Policy(threshold=suggestion.threshold, copies="reject")
    again = [decide_again(decision, policy).outcome for decision in decisions]
    assert again.count("accepted") / len(decisions) == pytest.approx(suggestion.accepted.value)
    assert suggestion.accepted.value <= unguarded


def test_a_report_counts_traces_that_guards_reject_and_never_as_nearly_accepted() -> None:
    decisions = decisions_with_copies(Policy(threshold=ACCEPT_ALL, copies="reject"))
    guarded = sum(decision.is_guarded for decision in decisions)
    analysis = analyse(decisions, 0)
    _, missed = analysis.closest
    assert missed == []
    assert analysis.total.accepted_at[0] == len(decisions) - guarded
    assert ["guard", "copies", str(guarded)] in [line.split()[:3] for line in text(analysis, "here", 0).splitlines()]
