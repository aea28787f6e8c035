"""Commands print progress and tables, take ids by their beginning, and show nothing that a terminal acts on."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from typing import Any, Final

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kp_scorer.characters import escaped, escaped_lines
from kp_scorer.cli.display import BehindFailures, DecisionTable, console
from kp_scorer.cli.ids import resolve_among
from kp_scorer.decision import Decision, Stated
from kp_scorer.report.phrases import short_id, why
from kp_scorer.settings import load_settings
from kp_scorer.trace import TRACE_ID_PREFIX, has_beginning

from tests.support import builders
from tests.support.builders import MIDDLING
from tests.support.processes import PATIENCE_S


def decision(outcome: str = "rejected", parts: dict[str, float] | None = None, **fields: Any) -> Decision:
    """Return a decision in the domain ``code`` with middling dimensions, except for those in ``parts``."""
    made = builders.decision("kp:trace:0123456789abcdef", score=0.525, **fields)
    return made.model_copy(update={"outcome": outcome, "dimensions": MIDDLING.model_copy(update=parts)})


def rendered(capsys: pytest.CaptureFixture[str], *decisions: Decision) -> str:
    table = DecisionTable()
    for each in decisions:
        table.print_decision(each)
    return capsys.readouterr().out


NEAR: Final = "kp:trace:fedcba9876543210"
OVERRIDES: Final = ("recovered_from_errors", "single_tool", "single_thought")
FIRED: Final = "a single thought (score 0.1), recovered from errors (+0.1), only one tool (-0.1)"


@pytest.mark.parametrize(
    ("explained", "words"),
    [
        (decision("accepted"), "high outcome"),
        (decision("accepted", {"novelty": 0.8, "tool_diversity": 1.0, "outcome_confidence": 0.79}), "high novelty, tools"),
        (decision("accepted", {"outcome_confidence": 0.79}), "no dimension is high"),
        (decision(), "low novelty"),
        (decision(parts={"novelty": 0.5, "complexity": 0.49, "tool_diversity": 0.0}), "low complexity, tools"),
        (decision(parts={"novelty": 1.0, "complexity": 1.0, "tool_diversity": 1.0}), "no dimension is low"),
        (decision(nearest=(NEAR, 1.0), duplicate_of=NEAR), "repeats fedcba98, low novelty"),
        (decision(nearest=(NEAR, 0.6)), "close to fedcba98 (0.60), low novelty"),
        (decision(nearest=(NEAR, 0.874)), "close to fedcba98 (0.87), low novelty"),
        (decision(nearest=(NEAR, 0.59)), "low novelty"),
        (decision("accepted", nearest=(NEAR, 1.0), duplicate_of=NEAR), "high outcome"),
        (decision("accepted", nearest=(NEAR, 0.6)), "high outcome"),
        (decision("accepted", overrides=OVERRIDES), f"{FIRED}, high outcome"),
        (decision(overrides=OVERRIDES), f"{FIRED}, low novelty"),
    ],
)
def test_reasons_are_overrides_then_a_similar_trace_then_high_or_low_dimensions(explained: Decision, words: str) -> None:
    assert why(explained) == words


def test_nothing_in_the_table_acts_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, decision().model_copy(update={"domain": "a\x1b[2J[b]c"}))
    assert "a\\u001b[2J[b]c" in text
    assert escaped_lines(text) == text


def test_table_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kp_scorer.cli.display._COLUMNS_WITHOUT_TERMINAL", 80)
    rows = [
        decision("accepted", {"novelty": 0.9, "complexity": 0.9}, overrides=("single_tool",), domain="customer_service"),
        decision("rejected", domain="d" * 200),
    ]
    text = rendered(capsys, *rows)
    assert text.count("needs") == 1
    assert max(map(len, text.splitlines())) <= 80
    words = " ".join(text.split())
    assert "01234567 customer_service 0.525 0.75 accepted only one tool" in words
    assert f"01234567 {'d' * 15}… 0.525 0.75 rejected low novelty" in words


def test_wide_table_shows_the_beginnings_of_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    DecisionTable(has_tasks=True).print_decision(decision(), "When is\nhigh water? " * 20)
    heading, _, row = capsys.readouterr().out.splitlines()
    assert heading.split()[-2:] == ["why", "task"]
    assert row.endswith("  When is high water? When is high water?…")
    assert max(map(len, (heading, row))) <= 160


@pytest.mark.parametrize(
    ("similarity", "score", "against", "words"),
    [
        (
            0.9,
            0.4,
            "all",
            "1 success scores less than the failed run before that is like it: try --set novelty.against=succeeded\n",
        ),
        (0.5, 0.4, "all", ""),
        (0.9, 0.6, "all", ""),
        (0.9, 0.4, "succeeded", ""),
    ],
    ids=["it happens", "unlike", "more than it", "set already"],
)
def test_success_behind_the_failed_run_that_came_first_is_named(
    capsys: pytest.CaptureFixture[str], similarity: float, score: float, against: str, words: str
) -> None:
    behind = BehindFailures(load_settings({"novelty.against": against}))
    stated = Stated(success=False, confidence=0.9, recoveries=0)
    behind.add(builders.decision(NEAR, score=0.5, stated=stated))
    behind.add(builders.decision(score=score, nearest=(NEAR, similarity), stated=stated.model_copy(update={"success": True})))
    behind.note()
    assert capsys.readouterr().err == words


ENDS = st.text("ab*[]?:", min_size=1, max_size=12)


@given(st.sets(ENDS.map(TRACE_ID_PREFIX.__add__), min_size=1), st.data())
def test_beginning_resolves_to_the_only_id_that_has_it(ids: set[str], data: st.DataObject) -> None:
    meant = data.draw(st.sampled_from(sorted(ids)))
    end = meant.removeprefix(TRACE_ID_PREFIX)
    beginning = end[: data.draw(st.integers(1, len(end)))]
    others = {each for each in ids if has_beginning(each, beginning)} - {meant}
    if beginning == end or not others:
        assert resolve_among(beginning, ids) == meant
    elif TRACE_ID_PREFIX + beginning not in others:
        with pytest.raises(click.BadParameter, match="give more of the one you mean"):
            resolve_among(beginning, ids)


def test_a_beginning_may_leave_out_namespaces() -> None:
    ids = ["kp:trace:langfuse:4f1c20a9", "kp:trace:langfuse:5d41402a"]
    assert resolve_among("4f", ids) == resolve_among("langfuse:4", ids) == ids[0]
    assert short_id(ids[0]) == "4f1c20a9"


@pytest.mark.parametrize("nothing", ["", "kp:trace:"])
def test_empty_id_is_refused(nothing: str) -> None:
    with pytest.raises(click.BadParameter, match="expected an id"):
        resolve_among(nothing, ["kp:trace:1"])
    with pytest.raises(click.BadParameter, match="expected an id"):
        resolve_among("", ["5d41402a"])


HOSTILE: Final = "a\x1b[2Jb\x07\x7f\x9b31m\u202egnp.exe\u2066\u2028\u2029\u200f\u061c\r\0\ud800c"
OUR_COLOURS: Final = re.compile("\x1b\\[[0-9;]*m")
MARK: Final = "what a trace says"

LOGGING: Final = f"""
import logging, sys, structlog
from kp_scorer.logs import configure_logs
from kp_scorer.settings.sections import LogSettings

sys.stderr.isatty = lambda: sys.argv[1] == "console"
configure_logs(LogSettings())
hostile = {HOSTILE.replace(chr(0xD800), "")!a}
structlog.get_logger("ours").warning("trace_waits", detail=hostile, spaced=f"x {{hostile}}", listed=[hostile])
logging.getLogger("of others").warning("%s\\n%s", hostile, hostile)
payload = "{MARK}"
try:
    raise ValueError(f"two\\nlines {{hostile}}")
except ValueError:
    logging.getLogger("of others").exception("failed")
"""


@cache
def logged(log_format: str, **variables: str) -> str:
    """Run ``LOGGING`` with this format of logs, and return its stderr."""
    program = [sys.executable, "-c", LOGGING, log_format]
    done = subprocess.run(program, env=os.environ | variables, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return done.stderr


@given(st.text(st.characters()))
@example(HOSTILE)
def test_escaped_json_is_equal_and_safe(text: str) -> None:
    line = json.dumps({text: [text]}, ensure_ascii=False)
    assert json.loads(escaped(line)) == {text: [text]}
    assert escaped(escaped(line)) == escaped(line)


@given(st.text(st.characters()))
@example(HOSTILE + "\n")
def test_escaping_keeps_only_line_breaks(text: str) -> None:
    assert escaped_lines(text).split("\n") == [escaped(line) for line in text.split("\n")]


def test_no_color_turns_colours_off(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" in logged("console")
    assert "\x1b" not in logged("console", NO_COLOR="1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    for wanted in ("", "1"):
        monkeypatch.setenv("NO_COLOR", wanted)
        console().print("[red]refused[/]")
    first, second = capfd.readouterr().err.splitlines()
    assert (first, second) == ("\x1b[31mrefused\x1b[0m", "refused")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_lines_are_safe_and_show_no_local_variables(log_format: str) -> None:
    uncoloured = OUR_COLOURS.sub("", logged(log_format))
    assert uncoloured.count("gnp.exe") >= 5
    assert "ValueError: two" in uncoloured
    assert MARK not in uncoloured
    assert escaped_lines(uncoloured) == uncoloured
