"""The words a person reads behind a decision, and the row they stand in."""

from typing import Any

import pytest
from kp_scorer.characters import acts
from kp_scorer.cli.table import decisions_table
from kp_scorer.cli.words import short_id, why
from kp_scorer.decision import Decision, Dimensions, FiredOverride, Nearest, Novelty, Override, Timings
from kp_scorer.scoring import PROFILES
from rich.console import Console

MIDDLING = Dimensions(complexity=0.6, novelty=0.4, tool_diversity=0.5, outcome_confidence=0.8)


def decision(
    outcome: str = "rejected",
    parts: dict[str, float] | None = None,
    *,
    overrides: tuple[Override, ...] = (),
    novelty: Novelty | None = None,
) -> Decision:
    fields: dict[str, Any] = {
        "trace_id": "kp:trace:0123456789abcdef",
        "domain": "code",
        "outcome": outcome,
        "score": 0.525,
        "threshold": 0.75,
        "threshold_source": "default",
        "dimensions": MIDDLING.model_copy(update=parts),
        "profile": "code",
        "weights": PROFILES["code"],
        "composite": 0.5,
        "overrides": tuple(FiredOverride(name=name, score=0.5) for name in overrides),
        "novelty": novelty or Novelty(source="embedding"),
        "timings": Timings(look_up_ms=0, embed_ms=0, place_ms=0, batch_size=1),
        "decided_at": "2026-01-01T00:00:00.000+00:00",
    }
    return Decision(**fields)


def near(similarity: float, *, duplicate: bool = False) -> Novelty:
    nearest = Nearest(trace_id="kp:trace:fedcba9876543210", similarity=similarity)
    return Novelty(source="embedding", nearest=nearest, duplicate_of=nearest.trace_id if duplicate else None)


def shown(*decisions: Decision, columns: int = 200) -> str:
    console = Console(width=columns, color_system=None)
    with console.capture() as capture:
        console.print(decisions_table(decisions, console.width))
    return capture.get()


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"novelty": 0.7}, "new"),
        ({"complexity": 0.8}, "rich steps"),
        ({"tool_diversity": 0.9}, "varied tools"),
        ({"outcome_confidence": 0.85}, "confident success"),
        ({"novelty": 0.9, "tool_diversity": 1.0}, "new, varied tools"),
        (
            {"novelty": 0.69, "complexity": 0.79, "tool_diversity": 0.89, "outcome_confidence": 0.84},
            "just enough of everything",
        ),
    ],
)
def test_accepted_trace_is_explained_by_its_strengths(parts: dict[str, float], words: str) -> None:
    assert why(decision("accepted", parts)) == words


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"outcome_confidence": 0.27}, "failed or doubtful"),
        ({"outcome_confidence": 0.3}, "failed or doubtful"),
        ({"outcome_confidence": 0.5}, "unsure outcome"),
        ({"complexity": 0.49}, "simple steps"),
        ({"tool_diversity": 0.0}, "no tools"),
        ({"complexity": 0.1, "tool_diversity": 0.0}, "simple steps, no tools"),
        ({}, "a little short everywhere"),
    ],
)
def test_rejected_trace_is_explained_by_its_weaknesses(parts: dict[str, float], words: str) -> None:
    assert why(decision("rejected", parts)) == words


def test_strengths_do_not_explain_a_rejection_nor_weaknesses_an_acceptance() -> None:
    strong = {"novelty": 1.0, "complexity": 1.0, "tool_diversity": 1.0, "outcome_confidence": 1.0}
    weak = {"novelty": 0.0, "complexity": 0.0, "tool_diversity": 0.0, "outcome_confidence": 0.0}
    assert why(decision("rejected", strong)) == "a little short everywhere"
    assert why(decision("accepted", weak, novelty=near(0.9))) == "just enough of everything"


def test_duplicate_is_said_to_repeat_the_earlier_trace() -> None:
    assert why(decision(novelty=near(1.0, duplicate=True))) == "repeats fedcba98"


@pytest.mark.parametrize(
    ("similarity", "words"),
    [(0.6, "close to fedcba98 (0.60)"), (0.874, "close to fedcba98 (0.87)"), (0.59, "a little short everywhere")],
)
def test_near_duplicate_is_said_to_be_close_to_the_earlier_trace(similarity: float, words: str) -> None:
    assert why(decision(novelty=near(similarity))) == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("single_thought", "a single thought (score 0.1)"),
        ("recovered_from_errors", "recovered from errors (+0.1)"),
        ("single_tool", "only one tool (-0.1)"),
    ],
)
@pytest.mark.parametrize("outcome", ["accepted", "rejected"])
def test_override_explains_any_outcome(name: Override, words: str, outcome: str) -> None:
    assert why(decision(outcome, overrides=(name,))) == words


def test_overrides_come_first_and_three_reasons_are_enough() -> None:
    weak = {"outcome_confidence": 0.2, "complexity": 0.1, "tool_diversity": 0.0}
    explained = why(decision("rejected", weak, overrides=("recovered_from_errors", "single_tool")))
    assert explained == "recovered from errors (+0.1), only one tool (-0.1), failed or doubtful"


@pytest.mark.parametrize(
    ("trace_id", "short"), [("kp:trace:0123456789", "01234567"), ("kp:trace:ab", "ab"), ("kp:trace:kp:trace:x", "kp:trace")]
)
def test_short_id_is_the_start_of_the_part_that_differs(trace_id: str, short: str) -> None:
    assert short_id(trace_id) == short


def test_row_shows_figures_outcome_and_reason() -> None:
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in shown(decision("accepted"), decision("rejected", {"outcome_confidence": 0.12})).splitlines()
        if "01234567" in line
    ]
    assert rows == [
        ["01234567", "code", "0.60", "0.40", "0.50", "0.80", "0.525", "0.75", "accepted", "just enough of everything"],
        ["01234567", "code", "0.60", "0.40", "0.50", "0.12", "0.525", "0.75", "rejected", "failed or doubtful"],
    ]


def test_table_without_decisions_has_only_headings() -> None:
    assert "why" in shown()
    assert "code" not in shown()


def test_nothing_in_the_table_acts_on_a_terminal() -> None:
    text = shown(decision().model_copy(update={"domain": "a\x1b[2J\u202e\x9b[b]c"}))
    assert "a\\u001b[2J\\u202e\\u009b[b]c" in text
    assert not any(acts(line) for line in text.split("\n"))


def test_80_columns_are_enough() -> None:
    long = decision("accepted", {"novelty": 0.9, "complexity": 0.9}, overrides=("recovered_from_errors", "single_tool"))
    text = shown(long.model_copy(update={"domain": "customer_service"}), decision("rejected"), columns=80)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    words = " ".join(text.split())
    for figure in (
        "01234567 customer_service 0.525 0.75 accepted recovered",
        "01234567 code 0.525 0.75 rejected a little short",
    ):
        assert figure in words


def test_no_width_is_taken_by_a_domain_however_long() -> None:
    text = shown(decision().model_copy(update={"domain": "d" * 200}), columns=80)
    assert "a little short everywhere" in " ".join(text.split())
