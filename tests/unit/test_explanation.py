"""What a decision is taken apart into, and with what it would have passed, against the scoring itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.analysis.explanation import DIMENSIONS, Explanation, explain, origin, said, with_dimension
from kp_scorer.decision import Dimensions
from kp_scorer.scoring import PROFILES, Policy
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import decided, make_trace, step, steps, traces

ALL_TYPES = ("thought", "tool_call", "observation", "error_recovery")
OWN_WEIGHTS = Dimensions(complexity=0.0, novelty=0.6, tool_diversity=0.3, outcome_confidence=0.1)
POLICIES = st.builds(
    Policy,
    profiles=st.just(PROFILES) | st.just({**PROFILES, "code": OWN_WEIGHTS}),
    threshold=st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.75, 1.0]),
    review=st.none() | st.floats(0, 1),
    cap_step_term=st.booleans(),
)


def least(explanation: Explanation) -> dict[str, float | None]:
    return {term.dimension: term.least for term in explanation.terms}


@given(traces(), POLICIES)
def test_what_would_pass_is_just_enough(trace: ReasoningTrace, policy: Policy) -> None:
    decision = decided(trace, policy)
    for term in explain(decision).terms:
        most = with_dimension(decision, term.dimension, 1.0)
        if term.least is None:
            assert most.score < decision.threshold
            continue
        enough = with_dimension(decision, term.dimension, term.least)
        assert enough.outcome == "accepted"
        if term.least:
            short = with_dimension(decision, term.dimension, term.least - 1e-12)
            assert short.score < decision.threshold <= enough.score <= decision.threshold + 1e-9


@given(traces(), POLICIES)
def test_what_passes_already_would_pass_with_no_more_than_it_has(trace: ReasoningTrace, policy: Policy) -> None:
    decision = decided(trace, policy)
    explanation = explain(decision)
    for term in explanation.terms:
        assert (term.least is not None and term.least <= term.value) == (decision.outcome == "accepted")
    assert (explanation.margin >= 0) == (decision.outcome == "accepted")


@given(traces(), POLICIES)
def test_products_make_the_composite(trace: ReasoningTrace, policy: Policy) -> None:
    explanation = explain(decided(trace, policy))
    assert [term.dimension for term in explanation.terms] == list(DIMENSIONS)
    assert math.isclose(
        min(1.0, sum(term.product for term in explanation.terms)), explanation.decision.composite, abs_tol=1e-12
    )


@given(traces(), POLICIES)
def test_terms_of_the_trace_lead_to_its_dimensions(trace: ReasoningTrace, policy: Policy) -> None:
    decision = decided(trace, policy)
    found = origin(trace, decision)
    parts = decision.dimensions
    assert found.is_of_this
    assert found.is_capped == (policy.cap_step_term and len(trace.steps) > 20 and found.complexity.complexity < 1)
    assert found.complexity.complexity == parts.complexity
    assert min(1.0, len(found.tools) / found.steps * 3) == parts.tool_diversity
    assert found.confidence * found.success_factor == parts.outcome_confidence


def test_a_rejected_trace_by_hand() -> None:
    # Complexity 0.27, novelty 0.5 without an embedder, no tools, confidence 0.3 after a failure: 0.3175.
    trace = make_trace(success=False)
    found = explain(decided(trace, Policy(threshold=0.4)))
    assert found.decision.score == pytest.approx(0.3175)
    assert found.margin == pytest.approx(-0.0825)
    assert least(found) == {
        "complexity": pytest.approx(0.27 + 0.0825 / 0.25),
        "novelty": pytest.approx(0.5 + 0.0825 / 0.35),
        "tool_diversity": pytest.approx(0.0825 / 0.15),
        "outcome_confidence": pytest.approx(0.3 + 0.0825 / 0.25),
    }


def test_no_dimension_lifts_a_single_thought() -> None:
    found = explain(decided(make_trace(steps=steps("thought"))))
    assert set(least(found).values()) == {None}
    (without,) = found.without
    assert (without.override, without.passes) == ("single_thought", False)
    assert without.score == found.decision.composite


def test_without_its_penalty_a_trace_may_pass() -> None:
    used = [step(kind, "sql") for kind in ALL_TYPES]
    found = explain(decided(make_trace(steps=used), Policy(threshold=0.7)))
    # 0.21 + 0.175 + 0.1125 + 0.25, of which a single tool takes a tenth.
    assert found.decision.score == pytest.approx(0.6475)
    (without,) = found.without
    assert (without.override, without.passes) == ("single_tool", True)
    assert without.score == pytest.approx(0.7475)


def test_a_trace_of_other_content_is_not_taken_for_the_decided_one() -> None:
    decision = decided(make_trace())
    assert not origin(make_trace(steps=steps(*ALL_TYPES)), decision).is_of_this


def test_what_a_trace_says_is_shortened_on_one_line() -> None:
    content = [
        step("thought", content="then"),
        step("tool_call", content="first\n\tof  all"),
        step("observation", content="no"),
    ]
    found = said(make_trace(objective="o" * 1_000, steps=content))
    assert found.did == "first of all then"
    assert len(found.asked) == 240
    assert found.asked.endswith("o…")
