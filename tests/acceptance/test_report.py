"""The report of the samples works in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from kp_scorer import score_traces
from kp_scorer.settings import load_settings

from tests.support.browser import PROGRAM, Browser, running_browser
from tests.support.builders import minimal_payload
from tests.support.commands import jsonl_file, run
from tests.support.required import required
from tests.support.traces import sample_traces

EMPTY: Final = (
    "[...document.querySelectorAll('.chart')].filter(each => !each.querySelector('svg [aria-roledescription]')).length"
)
OVERFLOWING: Final = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
INK: Final = "getComputedStyle(document.querySelector('.chart svg text')).fill"
FIRST_BAR: Final = """(() => {
  const first = document.querySelector('.chart .mark-rect path');
  first.scrollIntoView({ block: 'center' });
  const bar = first.getBoundingClientRect();
  return [bar.x + bar.width / 2, bar.y + bar.height / 2];
})()"""
LAST_POINT: Final = FIRST_BAR.replace(
    "querySelector('.chart .mark-rect path')", "querySelector('.chart .mark-symbol path:last-child')"
)
TOOLTIP: Final = "document.querySelector('#vg-tooltip-element.visible')?.innerText"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of the report on the samples' decisions."""
    required(PROGRAM)
    folder = tmp_path_factory.mktemp("report")
    decisions = score_traces(sample_traces(), load_settings({"embedding.embedder": "words"}))
    file = jsonl_file(folder / "decisions.jsonl", *decisions)
    done = run("report", str(file), "--output", str(folder / "report.html"))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return folder / "report.html"


@pytest.fixture(scope="module")
def opened(page: Path) -> Iterator[Browser]:
    with running_browser() as started:
        yield started


@pytest.mark.parametrize("width", [380, 1_400])
def test_all_charts_are_drawn_and_nothing_is_fetched(opened: Browser, page: Path, width: int) -> None:
    assert opened.open(page, width) == "drawn"
    assert opened.evaluate("document.querySelectorAll('.chart').length") > 10
    assert opened.evaluate(EMPTY) == 0
    assert not opened.evaluate(OVERFLOWING)
    x, y = opened.evaluate(FIRST_BAR)
    opened.point_at(x, y)
    assert "traces" in (opened.evaluate(TOOLTIP) or "")
    assert opened.complaints() == []
    assert opened.requests() == [page.as_uri()]


def test_charts_follow_the_dark_mode(opened: Browser, page: Path) -> None:
    inks = set()
    for dark in (False, True):
        assert opened.open(page, 380, dark=dark) == "drawn"
        inks.add(opened.evaluate(INK))
        assert opened.complaints() == []
    assert len(inks) == 2


def test_a_click_on_the_map_shows_the_trace(opened: Browser, page: Path) -> None:
    folder = page.parent
    objective = "Explain <b>tides</b>"
    traces = jsonl_file(
        folder / "traces.jsonl", minimal_payload(), minimal_payload(trace_id="kp:trace:tides", objective=objective)
    )
    kept_folder = folder / "kept"
    kept_folder.mkdir()
    jsonl_file(kept_folder / "kept-0001.jsonl", {"trace_id": "kp:trace:tides"})
    words = ("--set", "embedding.embedder=words")
    done = run("report", str(traces), "--kept", str(kept_folder), "--output", str(folder / "map.html"), *words)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert opened.open(folder / "map.html", 1_400) == "drawn"
    opened.click_at(*opened.evaluate(LAST_POINT))
    shown_text = opened.evaluate("document.querySelector('.clicked').innerText")
    assert shown_text.split("\n\n")[:2] == [objective, "kp:trace:tides: kept, succeeded"]
    assert "1 kept and 1 dropped ones are shown" in opened.evaluate("document.body.innerText")
    assert opened.complaints() == []


def test_page_goes_to_the_file_that_stdout_leads_to(page: Path) -> None:
    done = run("report", str(page.with_name("decisions.jsonl")))
    assert (done.returncode, done.stdout, done.stderr) == (0, page.read_text("utf-8"), "")


def test_a_map_needs_the_traces(page: Path) -> None:
    done = run("report", str(page.with_name("decisions.jsonl")), "--kept", str(page.with_name("decisions.jsonl")))
    assert (done.returncode, "FILE of traces, which the map shows" in done.stderr) == (2, True)
