"""The page about the score computes what the code computes."""

import json
import re
from typing import Final

from click.testing import CliRunner
from kp_scorer.cli.main import commands
from kp_scorer.decision import Dimensions
from kp_scorer.scoring import DEFAULT_THRESHOLD, PROFILES, Policy, score
from kp_scorer.trace import ReasoningTrace

from tests.support.builders import make_trace, step
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
