"""The terms of a decision and the sentences of `kp-scorer explain` agree with the scoring itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.cli.commands.report import dead_words
from kp_scorer.decision import GateResult, Nearest, Novelty
from kp_scorer.errors import REASONS
from kp_scorer.report.explanation import decided_words, explain, terms_of, was_capped, with_dimension
from kp_scorer.scoring import PROFILES, Policy
from kp_scorer.settings import load_settings
from kp_scorer.store.dead_letters import DeadLetter
from kp_scorer.trace import ReasoningTrace
from rich.cells import cell_len

from tests.support.builders import OWN_WEIGHTS, decided, make_trace, policies, steps, traces

ALL_TYPES = ("thought", "tool_call", "observation", "error_recovery")
CAPPED_OR_NOT = policies(cap_step_term=st.booleans())


@given(traces(), CAPPED_OR_NOT)
def test_least_value_is_just_enough_to_pass(trace: ReasoningTrace, policy: Policy) -> None:
    decision = decided(trace, policy)
    for term in terms_of(decision):
        assert (term.least is not None and term.least <= term.value) == (decision.outcome == "accepted")
        if term.least is None:
            assert with_dimension(decision, term.dimension, 1.0).score < decision.threshold
            continue
        enough = with_dimension(decision, term.dimension, term.least)
        assert enough.outcome == "accepted"
        if term.least:
            short = with_dimension(decision, term.dimension, term.least - 1e-12)
            assert short.score < decision.threshold <= enough.score <= decision.threshold + 1e-9


@given(traces(), CAPPED_OR_NOT)
def test_capped_step_term_is_recognised(trace: ReasoningTrace, policy: Policy) -> None:
    decision = decided(trace, policy)
    assert was_capped(trace, decision) == (
        policy.cap_step_term and len(trace.steps) > 20 and decision.dimensions != decided(trace).dimensions
    )


def test_trace_of_other_content_is_recognised() -> None:
    assert was_capped(make_trace(steps=steps(*ALL_TYPES)), decided(make_trace())) is None


NEAREST = "kp:trace:" + "a" * 36


def words(
    trace: ReasoningTrace, policy: Policy | None = None, *, has_trace: bool = True, novelty: Novelty | None = None
) -> list[str]:
    decision = decided(trace, policy)
    if novelty:
        decision = decision.model_copy(update={"novelty": novelty})
    return list(decided_words(decision, {each: trace for each in (trace.id, NEAREST) if has_trace}))


@given(traces(), st.floats(0, 1), st.booleans(), st.sampled_from(["count 猫 and 犬 " * 30, "逆順" * 200, "short"]))
def test_sentences_fit_80_columns(trace: ReasoningTrace, threshold: float, has_trace: bool, objective: str) -> None:
    trace = trace.model_copy(update={"task": trace.task.model_copy(update={"objective": objective})})
    nearest = Novelty(source="embedding", nearest=Nearest(trace_id=NEAREST, similarity=0.5))
    lines = words(trace, Policy(threshold=threshold, review=threshold / 2), has_trace=has_trace, novelty=nearest)
    assert max(map(cell_len, lines)) <= 80


def test_arithmetic_of_a_rejected_trace() -> None:
    assert words(make_trace(success=False, domain="travel"), Policy(threshold=0.6)) == [
        "kp:trace:minimal: rejected with 0.3175",
        "That is 0.2825 short of the 0.6000 that it needs, the threshold of all domains.",
        "Its domain, travel, is weighed by the profile default.",
        "",
        "  complexity          0.2700 x 0.2500 = 0.0675",
        "      2 of 4 types of steps 0.2500 + 0 recoveries 0.0000 + 2 steps 0.0200",
        "  novelty             0.5000 x 0.3500 = 0.1750",
        "      there was no embedder, so every trace has this: install",
        "      kp-scorer[embedding]",
        "  tool diversity      0.0000 x 0.1500 = 0.0000",
        "      3 x 0 tools / 2 steps",
        "  outcome confidence  0.3000 x 0.2500 = 0.0750",
        "      confidence 1.0000 x 0.3, as it failed",
        "  composite, their sum                  0.3175",
        "  score                                 0.3175",
        "",
        "To pass, all else as it is, it would need one of these:",
        "  complexity          not even 1 is enough",
        "  novelty             not even 1 is enough",
        "  tool diversity      not even 1 is enough",
        "  outcome confidence  not even 1 is enough",
        "",
        "This trace",
        "  asked  count the open invoices",
        "  did    nothing",
    ]


@pytest.mark.parametrize(("success", "ceiling"), [(False, 1.0), (True, 0.3)])
def test_limit_of_a_failure_and_of_a_ceiling_of_confidence_is_shown(success: bool, ceiling: float) -> None:
    lines = words(make_trace(success=success), Policy(threshold=0.4, max_confidence=ceiling))
    assert "  outcome confidence  0.6300 or more, but such a trace has 0.3 at most" in lines


def test_dead_trace_is_shown_with_its_newest_dead_letter_and_a_remedy() -> None:
    dead_letters = [DeadLetter(letter_id * 32, "lost", "sent 3 times", "kp:trace:1", 0, 0, 0, 1, 10) for letter_id in "ab"]
    assert list(dead_words("kp:trace:1", "lost", "sent 3 times", dead_letters)) == [
        "kp:trace:1: dead, lost: sent 3 times",
        "It was sent again and again, and never decided. Once the queue works, replay it.",
        "Its submission is a dead letter, last dead-lettered at 1970-01-01 00:00:00 UTC:",
        f"  kp-scorer dead-letter show {'b' * 32}",
        f"  kp-scorer dead-letter replay {'b' * 32}",
        "There are 1 more with its id; `kp-scorer dead-letter list` shows them.",
    ]


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_a_remedy(reason: str) -> None:
    assert len(list(dead_words("kp:trace:1", reason, "why", []))) >= 2


def test_each_profile_decides_as_a_trace_of_its_domain_would_be_decided() -> None:
    trace = make_trace(domain="finance", confidence=0.9, steps=steps(*ALL_TYPES))
    settings = load_settings({"scoring.thresholds": {"medical": 0.3}, "scoring.profiles": {"law": OWN_WEIGHTS.model_dump()}})
    words = explain(decided(trace, settings.scoring), trace, settings=settings)
    for profile in (*PROFILES, "law"):
        own = decided(make_trace(domain=profile, confidence=0.9, steps=steps(*ALL_TYPES)), settings.scoring)
        assert f"\n  {profile:<20}{own.score:.4f} of {own.threshold:.4f}: {own.outcome}\n" in words
    assert "asked  count the open invoices" in words


def test_a_gate_explains_itself_in_place_of_the_threshold() -> None:
    nearest = Nearest(trace_id="kp:trace:near", similarity=0.25)
    result = GateResult(adds=0.8, bar=1.2, share=0.1, eligible=True, nearest=nearest, as_of="0-0")
    text = " ".join(explain(decided(make_trace()).model_copy(update={"gate": result})).split())
    assert "The gate asks it to add 1.2000 runs, as one in 10 of its domain does; it adds 0.8000, beside near (0.2500)" in text
    assert "and that is not enough." in text
    assert "To pass, all else as it is" not in text
    fixed = result.model_copy(update={"share": None, "eligible": False, "nearest": None})
    text = " ".join(explain(decided(make_trace()).model_copy(update={"gate": fixed})).split())
    assert "runs; it adds 0.8000 and it may not be kept. It does not meet the requirement of routing.requires." in text
