"""Nothing that a trace or a file says reaches a terminal with characters that one acts on."""

import json
import os
import re
import subprocess
import sys
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kp_scorer.characters import acts, escaped, escaped_lines
from kp_scorer.cli.output import console, print_json, say

HOSTILE: Final = "a\x1b[2Jb\x07\x7f\x9b31m\u202egnp.exe\u2066\u2028\u2029\u200f\u061c\r\0\ud800c"
OUR_COLOURS: Final = re.compile("\x1b\\[[0-9;]*m")
MARK: Final = "what a trace says"

LOGGING: Final = f"""
import logging, sys, structlog
from kp_scorer.logs import configure_logs
from kp_scorer.settings import LogSettings

configure_logs(LogSettings(format=sys.argv[1]))
hostile = {HOSTILE.replace(chr(0xD800), "")!a}
structlog.get_logger("ours").warning("trace_waits", detail=hostile, spaced=f"x {{hostile}}", listed=[hostile])
logging.getLogger("of others").warning("%s\\n%s", hostile, hostile)
payload = "{MARK}"
try:
    raise ValueError(f"two\\nlines {{hostile}}")
except ValueError:
    logging.getLogger("of others").exception("failed")
"""


@given(st.text(st.characters()))
@example(HOSTILE)
def test_escaped_json_says_the_same_and_acts_no_more(text: str) -> None:
    line = json.dumps({text: [text]}, ensure_ascii=False)
    assert json.loads(escaped(line)) == {text: [text]}
    assert not acts(escaped(line))
    assert escaped(escaped(line)) == escaped(line)


@given(st.text(st.characters()))
@example(HOSTILE + "\n")
def test_what_is_escaped_can_be_seen_and_only_lines_stay_lines(text: str) -> None:
    assert not acts(escaped(text))
    assert escaped_lines(text).split("\n") == [escaped(line) for line in text.split("\n")]


@pytest.mark.parametrize("text", ["plain", "\u65e5\u672c\u8a9e \U0001f600", "\u05e9\u05dc\u05d5\u05dd", "a\\u001b"])
def test_what_only_shows_stays_as_it_is(text: str) -> None:
    assert (acts(text), escaped(text)) == (False, text)


def test_commands_print_nothing_that_acts(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"payload": HOSTILE})
    say(f"one\n{HOSTILE}")
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"payload": HOSTILE}
    assert not acts(shown.out.removesuffix("\n"))
    assert shown.err.split("\n") == ["one", escaped(HOSTILE), ""]


def test_no_colours_where_none_are_wanted(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    program = [sys.executable, "-c", LOGGING, "console"]
    coloured, plain = (
        subprocess.run(program, env=os.environ | wanted, capture_output=True, text=True, timeout=60, check=True).stderr
        for wanted in ({}, {"NO_COLOR": "1"})
    )
    assert "\x1b" in coloured
    assert "\x1b" not in plain
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    for wanted in ("", "1"):
        monkeypatch.setenv("NO_COLOR", wanted)
        console().print("[red]refused[/]")
    first, second = capfd.readouterr().err.splitlines()
    assert (first, second) == ("\x1b[31mrefused\x1b[0m", "refused")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_lines_act_on_nothing_and_show_no_local_variables(log_format: str) -> None:
    found = subprocess.run([sys.executable, "-c", LOGGING, log_format], capture_output=True, text=True, timeout=60, check=True)
    uncoloured = OUR_COLOURS.sub("", found.stderr)
    assert uncoloured.count("gnp.exe") >= 5
    assert "ValueError: two" in uncoloured
    assert MARK not in uncoloured
    assert not any(acts(line) for line in uncoloured.split("\n"))
