"""What is known of a trace, as a person reads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kp_scorer.analysis.explanation import explain, origin, said
from kp_scorer.cli.words import Known, dead_words, decided_words, pending_words
from kp_scorer.decision import Nearest, Novelty
from kp_scorer.errors import REASONS
from kp_scorer.scoring import Policy
from kp_scorer.store import DeadLetter, Waiting
from kp_scorer.trace import ReasoningTrace
from rich.cells import cell_len

from tests.support.builders import decided, make_trace, steps, traces


def words(
    trace: ReasoningTrace, policy: Policy | None = None, *, at_hand: bool = True, novelty: Novelty | None = None
) -> list[str]:
    decision = decided(trace, policy)
    if novelty:
        decision = decision.model_copy(update={"novelty": novelty})
    explanation = explain(decision)
    known = (
        Known(explanation, origin(trace, decision), said(trace), said(trace))
        if at_hand
        else Known(explanation, None, None, None)
    )
    return list(decided_words(known))


@given(traces(), st.floats(0, 1), st.booleans(), st.sampled_from(["count 猫 and 犬 " * 30, "逆順" * 200, "short"]))
def test_80_columns_are_enough(trace: ReasoningTrace, threshold: float, at_hand: bool, objective: str) -> None:
    trace = trace.model_copy(update={"task": trace.task.model_copy(update={"objective": objective})})
    nearest = Novelty(source="embedding", nearest=Nearest(trace_id="kp:trace:" + "a" * 36, similarity=0.5))
    lines = words(trace, Policy(threshold=threshold, review=threshold / 2), at_hand=at_hand, novelty=nearest)
    assert max(map(cell_len, lines)) <= 80


def test_the_arithmetic_of_a_rejected_trace() -> None:
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


def test_what_a_failure_can_not_have_is_said() -> None:
    assert "  outcome confidence  0.6300 or more, but a failure has 0.3 at most" in words(
        make_trace(success=False), Policy(threshold=0.4)
    )


@pytest.mark.parametrize(
    ("threshold", "how_far"),
    [(0.4925, "exactly the 0.4925"), (0.4, "0.0925 above the 0.4000"), (0.49251, "less than 0.0001 short of the 0.4925")],
)
def test_how_far_a_score_is_from_the_threshold(threshold: float, how_far: str) -> None:
    _, second, *_ = words(make_trace(), Policy(threshold=threshold))
    assert second.startswith(f"That is {how_far} that it needs, ")


def test_a_fired_override_is_shown_with_the_score_after_it() -> None:
    text = "\n".join(words(make_trace(steps=steps("thought"))))
    assert "  a single thought (score 0.1)          0.1000\n  score                                 0.1000" in text
    assert "  without a single thought (score 0.1): 0.4587, it would not pass either" in text


def test_a_trace_that_is_not_at_hand_is_asked_for() -> None:
    nearest = Novelty(source="embedding", nearest=Nearest(trace_id="kp:trace:other", similarity=0.5), duplicate_of=None)
    text = "\n".join(words(make_trace(), at_hand=False, novelty=nearest))
    assert "The nearest earlier trace: kp:trace:other, similarity 0.5000\n" in text
    assert text.count("--traces FILE") == 2


def test_a_dead_trace_is_shown_with_its_newest_letter_and_what_to_do() -> None:
    letters = [DeadLetter(letter_id * 32, "lost", "sent 3 times", "kp:trace:1", 0, 0, 0, 1, 10) for letter_id in "ab"]
    assert list(dead_words("kp:trace:1", "lost", "sent 3 times", letters)) == [
        "kp:trace:1: dead, lost: sent 3 times",
        "No worker ever got it, however often it was sent. Once the queue is well, replay",
        "it.",
        "Its submission is a dead letter, last buried at 1970-01-01 00:00:00 UTC:",
        f"  kp-scorer dead-letter show {'b' * 32}",
        f"  kp-scorer dead-letter replay {'b' * 32}",
        "There are 1 more with its id; `kp-scorer dead-letter list` shows them.",
    ]


@pytest.mark.parametrize("reason", REASONS)
def test_every_death_comes_with_a_remedy(reason: str) -> None:
    assert len(list(dead_words("kp:trace:1", reason, "why", []))) >= 2


def test_a_pending_trace_is_shown_with_what_happened_to_it() -> None:
    text = "\n".join(pending_words("kp:trace:1", Waiting(1_000, 1, 2, b"")))
    assert text.startswith("kp:trace:1: pending since 1970-01-01 00:00:01 UTC\n")
    assert "sent again, 1 time." in text
    assert "in hand, 2 times." in text
