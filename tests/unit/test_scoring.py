"""The formulas and the overrides give the values that were worked out by hand, and the reference's own scores."""

import json
import math
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.decision import Dimensions
from kp_scorer.decoding import decode_trace
from kp_scorer.scoring import Policy, check_weights, decide_again, dimensions, novelty_of, score
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import LIMITS, Payload, changed, decided, make_trace, minimal_payload, policies, step, steps, traces
from tests.support.paths import REFERENCE_TRACES

POLICY: Final = Policy()
ALL_TYPES: Final = ("thought", "tool_call", "observation", "error_recovery")


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-12)


def used(*tools: str | None) -> list[Payload]:
    return [step("tool_call", tool) for tool in tools]


def complexity(*types: str, cap_step_term: bool = False) -> float:
    return dimensions(make_trace(steps=steps(*types)), 0.5, cap_step_term=cap_step_term).complexity


@pytest.mark.parametrize(
    ("types", "expected", "capped"),
    [
        (["thought"], 0.125 + 0.01, None),
        (["thought", "observation"], 0.25 + 0.02, None),
        (["error_recovery"], 0.125 + 0.3 + 0.01, None),
        (["error_recovery", "error_recovery"], 0.125 + 0.3 + 0.02, None),
        (ALL_TYPES, 0.5 + 0.3 + 0.04, None),
        (["thought"] * 20, 0.125 + 0.2, None),
        (["thought"] * 21, 0.125 + 0.21, 0.125 + 0.2),
        (["thought"] * 40, 0.125 + 0.4, 0.125 + 0.2),
        ([*ALL_TYPES, *["thought"] * 16], 1.0, None),
        (["thought"] * 100, 1.0, 0.125 + 0.2),
    ],
)
def test_complexity_adds_types_recovery_and_steps_up_to_1_and_to_20_steps_if_capped(
    types: list[str], expected: float, capped: float | None
) -> None:
    assert complexity(*types) == near(expected)
    assert complexity(*types, cap_step_term=True) == near(expected if capped is None else capped)


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([None], 0.0),
        (["sql", None, None, None, None, None], 0.5),
        (["sql", None, None], 1.0),
        (["sql", "sql", "sql", "sql"], 0.75),
        (["sql", "mail", None, None, None, None, None, None], 0.75),
        (["sql", "SQL", "Sql", None, None, None, None, None, None, None, None, None], 0.75),
        (["", None, None, None, None, None], 0.5),
        (["sql"], 1.0),
    ],
)
def test_tool_diversity_is_three_times_the_share_of_unique_names(tools: list[str | None], expected: float) -> None:
    assert dimensions(make_trace(steps=used(*tools)), 0.5).tool_diversity == near(expected)


def test_tools_count_by_their_name_whatever_their_server_and_the_type_of_their_step() -> None:
    on_two_servers = [step("tool_call") | {"tool": {"name": "sql", "mcp_server": server}} for server in "ab"]
    assert dimensions(make_trace(steps=[*on_two_servers, *steps(*["thought"] * 4)]), 0.5).tool_diversity == near(0.5)
    others = [step("observation", "sql"), step("thought", "mail"), *steps(*["thought"] * 10)]
    assert dimensions(make_trace(steps=others), 0.5).tool_diversity == near(0.5)


@pytest.mark.parametrize(
    ("confidence", "success", "expected"), [(0.8, True, 0.8), (0.8, False, 0.24), (0.0, True, 0.0), (1.0, False, 0.3)]
)
def test_failure_leaves_three_tenths_of_the_confidence(confidence: float, success: bool, expected: float) -> None:
    assert dimensions(make_trace(confidence=confidence, success=success), 0.5).outcome_confidence == near(expected)


@pytest.mark.parametrize(
    ("similarity", "novelty"), [(None, 0.5), (1.0, 0.0), (0.75, 0.25), (0.0, 1.0), (-0.5, 1.0), (1.0 + 1e-7, 0.0)]
)
def test_novelty_is_one_minus_similarity_or_a_half_without_one(similarity: float | None, novelty: float) -> None:
    assert novelty_of(similarity) == novelty


@pytest.mark.parametrize(
    "domain", ["toString", "constructor", "__proto__", "__class__", "Finance", "finance-2", "code-review", "get", "日本語"]
)
def test_domain_that_is_no_profile_exactly_gets_the_default(domain: str) -> None:
    assert score(make_trace(domain=domain), 0.5, POLICY).profile == "default"
    assert score(make_trace(domain=domain), 0.5, POLICY).score == score(make_trace(), 0.5, POLICY).score


@pytest.mark.parametrize("complexity_weight", [0.0, 0.1 - 1e-6, 0.1 + 1e-6, 1.0])
def test_weights_that_do_not_sum_to_one_are_refused(complexity_weight: float) -> None:
    weights = Dimensions(complexity=complexity_weight, novelty=0.2, tool_diversity=0.3, outcome_confidence=0.4)
    with pytest.raises(ValueError, match="weights must sum to 1"):
        check_weights(weights)


@pytest.mark.parametrize(
    ("its_steps", "succeeded", "failed"),
    [
        (steps("thought"), ["single_thought"], ["single_thought"]),
        ([step("thought", "sql")], ["single_thought", "single_tool"], ["single_thought", "single_tool"]),
        (steps("observation"), [], []),
        (steps("tool_call"), [], []),
        (steps("thought", "thought"), [], []),
        (steps(*["error_recovery"] * 2), [], []),
        (steps(*["error_recovery"] * 3), ["recovered_from_errors"], []),
        ([step("error_recovery", "sql")] * 4, ["recovered_from_errors", "single_tool"], ["single_tool"]),
        (used("a", None), ["single_tool"], ["single_tool"]),
        (used("a", "a"), ["single_tool"], ["single_tool"]),
        (used("a", "b"), [], []),
        (used("", None), ["single_tool"], ["single_tool"]),
    ],
)
def test_overrides_apply_to_a_lone_thought_three_recoveries_and_one_tool_in_order(
    its_steps: list[Payload], succeeded: list[str], failed: list[str]
) -> None:
    for success, fired in ((True, succeeded), (False, failed)):
        scored = score(make_trace(steps=its_steps, success=success), 0.5, POLICY)
        assert [override.name for override in scored.overrides] == fired


def test_penalty_for_a_single_tool_stops_at_zero() -> None:
    trace = make_trace(domain="medical", confidence=0.0, steps=[step("thought", "sql"), *steps(*["thought"] * 20)])
    scored = score(trace, 0.0, POLICY)
    assert 0.0 < scored.composite < 0.1
    assert scored.score == 0.0


def test_reward_and_penalty_apply_in_turn_so_that_the_cap_counts() -> None:
    its_steps = [step(kind, "sql") for kind in (*ALL_TYPES, "error_recovery", "error_recovery")]
    weights = Dimensions(complexity=0.0, novelty=1.0, tool_diversity=0.0, outcome_confidence=0.0)
    scored = score(make_trace(steps=its_steps), 0.95, Policy(profiles={"default": weights}))
    assert scored.score == near(0.9)


def test_perfect_trace_scores_one_even_where_the_weights_round_up() -> None:
    weights = Dimensions(complexity=0.05, novelty=0.55, tool_diversity=0.3, outcome_confidence=0.1)
    assert 0.05 + 0.55 + 0.3 + 0.1 > 1.0
    its_steps = [*used(*map(str, range(20))), *steps("thought", "observation", "error_recovery")]
    scored = score(make_trace(steps=its_steps), 1.0, Policy(profiles={"default": check_weights(weights)}))
    assert (scored.composite, scored.score) == (1.0, 1.0)


def test_threshold_is_the_domains_own_or_the_default_of_three_quarters() -> None:
    assert Policy().bounds("finance") == (0.75, "default", None)
    policy = Policy(threshold=0.6, thresholds={"code": 0.4})
    assert policy.bounds("code") == (0.4, "domain", None)
    assert policy.bounds("Code") == (0.6, "default", None)
    assert policy.bounds("constructor") == (0.6, "default", None)


def test_submitted_threshold_applies_only_if_the_policy_allows_it() -> None:
    assert Policy().bounds("code", 0.2) == (0.75, "default", None)
    assert Policy(submitted_thresholds=True).bounds("code", 0.2) == (0.2, "submission", None)
    assert Policy(thresholds={"code": 0.4}, submitted_thresholds=True).bounds("code") == (0.4, "domain", None)


@given(st.floats(0, 1), st.floats(0, 1), st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.floats(0, 1)))
def test_review_lies_between_rejected_and_accepted(
    value: float, threshold: float, review: float | None, of_domain: float | None
) -> None:
    reviews = {} if of_domain is None else {"code": of_domain}
    bounds = Policy(threshold=threshold, review=review, reviews=reviews).bounds("code")
    counts = of_domain if of_domain is not None else review
    outcome = bounds.outcome(value)
    assert (outcome == "accepted") == (value >= threshold)
    assert (outcome == "review") == (counts is not None and counts <= value < threshold)


def test_the_strictest_outcome_wins_where_several_are_demanded() -> None:
    bounds = Policy(review=0.5).bounds("code")
    assert bounds.outcome(0.8, demanded=["review", None]) == "review"
    assert bounds.outcome(0.8, demanded=["review", "rejected"]) == "rejected"
    assert bounds.outcome(0.1, demanded=["review"]) == "rejected"
    assert bounds.outcome(0.8, demanded=[None]) == "accepted"


@given(traces(), st.floats(0, 1), st.booleans())
def test_score_is_the_weighted_sum_of_fractions_and_what_each_override_makes_of_it(
    trace: ReasoningTrace, novelty: float, cap: bool
) -> None:
    scored = score(trace, novelty, Policy(cap_step_term=cap))
    parts, weights = scored.dimensions.model_dump(), scored.weights.model_dump()
    assert all(0.0 <= fraction <= 1.0 for fraction in (scored.score, scored.composite, *parts.values()))
    assert parts["novelty"] == novelty
    assert scored.composite == near(min(1.0, math.fsum(parts[name] * weights[name] for name in parts)))
    value = scored.composite
    for override in scored.overrides:
        effects = {"single_thought": 0.1, "recovered_from_errors": min(1.0, value + 0.1), "single_tool": max(0.0, value - 0.1)}
        value = effects[override.name]
        assert override.score == value
    assert scored.score == value


OBEYING_OR_NOT: Final = policies(submitted_thresholds=st.booleans())


@given(traces(), OBEYING_OR_NOT, OBEYING_OR_NOT)
def test_deciding_again_is_deciding_by_the_other_policy(trace: ReasoningTrace, before: Policy, after: Policy) -> None:
    first = decided(trace, before)
    again = decided(trace, after)
    assert decide_again(first, after) == again.model_copy(update={"timings": first.timings, "decided_at": first.decided_at})


def test_deciding_again_keeps_a_submitted_threshold_that_applied() -> None:
    asking = decode_trace(changed(minimal_payload(), "metadata.quality_threshold", 0.2), LIMITS)
    obeyed = decided(asking, Policy(submitted_thresholds=True))
    assert decide_again(obeyed, Policy(threshold=0.9, submitted_thresholds=True)).threshold == 0.2
    assert decide_again(obeyed, Policy(threshold=0.9)).threshold == 0.9


def test_alias_gets_the_profile_and_bounds_of_its_domain() -> None:
    policy = Policy(thresholds={"finance": 0.4}, reviews={"finance": 0.3}, aliases={"Finance": "finance"})
    alias, own, unrelated = (decided(make_trace(domain=domain), policy) for domain in ("Finance", "finance", "financial"))
    assert (alias.domain, alias.taken_for, alias.profile) == ("Finance", "finance", "finance")
    assert (alias.threshold, alias.threshold_source, alias.review) == (0.4, "domain", 0.3)
    differs = {"trace_id", "domain", "taken_for", "timings", "decided_at"}
    assert alias.model_dump(exclude=differs) == own.model_dump(exclude=differs)
    assert (own.taken_for, unrelated.taken_for, unrelated.profile, unrelated.threshold) == (None, None, "default", 0.75)


def test_a_domain_is_known_if_any_setting_names_it() -> None:
    named = {"thresholds": {"qa": 0.5}, "reviews": {"web": 0.5}, "min_novelties": {"legal": 0.2}}
    domains = Policy(**named, aliases={"Finance": "finance"}).domains
    assert {"default", "code", "qa", "web", "legal", "Finance"} <= domains
    assert not {"finanse", "QA"} & domains


def reference_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (REFERENCE_TRACES / name).read_text("utf-8").splitlines()]


@pytest.mark.skipif(not REFERENCE_TRACES.is_dir(), reason=f"there are no real traces in {REFERENCE_TRACES}")
def test_conformance_cases_and_real_traces_score_as_in_the_reference() -> None:
    real, rows = reference_rows("traces.jsonl"), reference_rows("expected.jsonl")
    conformance = reference_rows("conformance.jsonl")
    assert conformance
    assert len({trace["id"] for trace in real}) == len(real) > 0
    assert [trace["id"] for trace in real] == [row["id"] for row in rows]
    cases = [(row["case"], row["trace"], row["score"]) for row in conformance]
    cases += [(row["id"], trace, row["score_without_embedder"]) for trace, row in zip(real, rows, strict=True)]
    scores = {name: score(decode_trace(trace, LIMITS), novelty_of(None), POLICY).score for name, trace, _ in cases}
    assert scores == pytest.approx({name: expected for name, _, expected in cases}, abs=1e-9)
