"""The page about the score computes what the code computes."""

import json
import re
from typing import Any, Final

from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.decision import Dimensions
from kp_scorer.scoring import DEFAULT_THRESHOLD, PROFILES, Policy, score
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import make_trace, step, steps
from tests.support.paths import REPOSITORY

PAGE: Final = (REPOSITORY / "worker" / "SCORING.md").read_text("utf-8")
EQUATION: Final = re.compile(r"^    (\w+) = (.+) = (\d\.\d{4})$", re.MULTILINE)
WEIGHTS: Final = re.compile(r"^\| `(\w+)`.*?((?: \| \d\.\d\d){4}) \|$", re.MULTILINE)
SIMILARITY: Final = 0.62


def example() -> ReasoningTrace:
    (line,) = re.findall(r"^    (thought, .*)$", PAGE, re.MULTILINE)
    parts = [re.fullmatch(r"(\w+)(?:\((\w+)\))?", part) for part in line.split(", ")]
    return make_trace(domain="code", confidence=0.9, steps=[step(*part.groups()) for part in parts if part])


def test_the_trace_computed_by_hand_has_the_scores_of_the_page() -> None:
    values: dict[str, float] = {}
    for name, expression, result in EQUATION.findall(PAGE):
        assert re.fullmatch(r"(?:[\d. +*/(),-]|\b(?:min|max|[A-Z]|composite|recovered)\b)+", expression)
        values[name] = eval(expression, {"min": min, "max": max}, values)
        assert f"{values[name]:.4f}" == result
    scored = score(example(), 1 - SIMILARITY, Policy())
    assert list(values.values()) == [
        *dict(scored.dimensions).values(),
        scored.composite,
        *(override.score for override in scored.overrides),
    ]
    assert [override.name for override in scored.overrides] == ["recovered_from_errors", "single_tool"]


def test_the_page_and_the_command_have_the_weights_of_all_profiles() -> None:
    of_page = {name: tuple(map(float, row.split(" | ")[1:])) for name, row in WEIGHTS.findall(PAGE)}
    assert of_page == {name: tuple(dict(weights).values()) for name, weights in PROFILES.items()}
    assert f"threshold ({DEFAULT_THRESHOLD} by default)" in PAGE
    law = '{"law": {"complexity": 0, "novelty": 1, "tool_diversity": 0, "outcome_confidence": 0}}'
    done = CliRunner().invoke(
        commands, ["profiles", "--set", f"scoring.profiles={law}", "--set", 'scoring.thresholds={"law": 0.5}']
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    printed = {row["profile"]: Dimensions.model_validate(row) for row in rows}
    assert printed.keys() == {*PROFILES, "law"}
    assert all(printed[name] == weights for name, weights in PROFILES.items())
    assert [row["threshold"] for row in rows] == [*[DEFAULT_THRESHOLD] * len(PROFILES), 0.5]


def gain(name: str) -> float:
    """Return the gain that the page promises for a change."""
    (worth,) = re.findall(rf"^\| {name} \| (?:up to )?(0\.\d+)", PAGE, re.MULTILINE)
    return float(worth)


def value_of(trace: ReasoningTrace, novelty: float = 0.0) -> float:
    return score(trace, novelty, Policy()).score


def test_what_raises_a_score_is_worth_what_the_page_says() -> None:
    base: dict[str, Any] = {"confidence": 0.9, "steps": steps("thought", "observation", *["thought"] * 10)}
    plain = make_trace(**base)
    assert round(value_of(plain, 1.0) - value_of(plain), 3) == gain("an objective in words unlike earlier ones")
    sure, failed = make_trace(**base | {"confidence": 1.0}), make_trace(**base | {"confidence": 1.0, "success": False})
    assert round(value_of(sure) - value_of(failed), 3) == gain("success instead of failure")
    assert round(value_of(sure) - value_of(plain), 3) == gain("a confidence of 1 instead of 0.9")
    longer = make_trace(**base | {"steps": [*base["steps"], *steps(*["thought"] * 20)]})
    assert round(value_of(longer) - value_of(plain), 3) == gain("twenty empty steps")
    kinds = [["error_recovery"] * count + ["thought"] * (12 - count) for count in range(4)]
    recovering = [make_trace(steps=steps(*each)) for each in kinds]
    assert round(value_of(recovering[1]) - value_of(recovering[0]), 3) == gain("a first recovery") + 0.031
    assert round(value_of(recovering[3]) - value_of(recovering[1]), 3) == gain("two more recoveries, with success")
    single, pair = (make_trace(steps=[step("tool_call", f"tool{number % count}") for number in range(12)]) for count in (1, 2))
    assert round(value_of(pair) - value_of(single) - 0.45 / 12, 3) == gain("a second tool")
