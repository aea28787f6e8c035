"""The report shows its figures as text and as a page, in which nothing from a trace is executed."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from hypothesis import given
from kp_scorer.characters import escaped
from kp_scorer.cli.commands.report import report
from kp_scorer.cli.main import commands
from kp_scorer.decision import Decision, GateResult
from kp_scorer.errors import SettingsError
from kp_scorer.report.page import fingerprint, page
from kp_scorer.report.summary import analyse
from kp_scorer.report.text import COLUMNS, text
from rich.cells import cell_len

from tests.support.builders import decision, decisions, minimal_payload
from tests.support.commands import invoked, jsonl_file

HOSTILE: Final = "</script><script>alert(1)</script><!--\"'&\x1b[2J\u202e\n{{}}"
DEAD_LETTERS: Final = 3


def hostile_decisions() -> list[Decision]:
    """Return decisions with hostile texts in every field that can have one."""
    return [
        decision(f"kp:trace:{HOSTILE}", domain=HOSTILE, score=0.76, nearest=(HOSTILE, 0.99)),
        decision("kp:trace:1", domain="\u5ba2\u6236\u670d\u52d9" * 10, duplicate_of=HOSTILE, overrides=("single_tool",)),
    ]


class Elements(HTMLParser):
    """Parses a page into its elements and their texts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture(scope="module")
def page_html() -> str:
    return page(analyse(hostile_decisions(), DEAD_LETTERS)._replace(objectives={f"kp:trace:{HOSTILE}": HOSTILE}), HOSTILE, 3)


@given(decisions())
def test_text_fits_a_terminal_and_shows_nothing_that_acts(sample: list[Decision]) -> None:
    for line in text(analyse(sample, DEAD_LETTERS), "some.jsonl", 1).split("\n"):
        # Only a line with a long id may be longer, as ids are never truncated; these decisions have short ids.
        assert cell_len(line) <= COLUMNS
        assert escaped(line) == line


def test_text_has_figures_domains_and_dead_letters() -> None:
    scores = [number / 100 for number in range(100)]
    sample = [decision(f"kp:trace:{score}", score=score, domain="code" if score < 0.9 else HOSTILE) for score in scores]
    analysis = analyse([*sample, *hostile_decisions()], DEAD_LETTERS)
    report_text = text(analysis._replace(objectives={"kp:trace:0.99": "to be shown " * 20}), "some.jsonl", 2)
    lines = report_text.split("\n")
    assert lines[0] == "26 of 102 traces accepted (25%)"
    assert lines[1].startswith("some.jsonl · decided 2026-01-01 · threshold 0.75")
    assert any("lines refused 2" in line for line in lines)
    assert any(re.match(r"  code +90 traces, 15 accepted \(17%\) +█+", line) for line in lines)
    assert any(re.match(r"  all +102 +26 +76 0\.25 ", line) for line in lines)
    assert any("near duplicates 2" in line for line in lines)
    assert "dead letters 3" in " ".join(lines)
    assert any(line.startswith(f"    {'to be shown ' * 6}") for line in lines)
    assert any(re.match(r"  only one tool \(-0\.1\) +1 +1\.3%", line) for line in lines)


def test_thresholds_are_not_mentioned_where_a_gate_decides() -> None:
    gate = GateResult(adds=0.5, bar=0.7, share=0.1, eligible=True, nearest=None, as_of="0-0")
    sample = [decision(f"kp:trace:{number}", score=number / 20, gate=gate) for number in range(20)]
    report_text = text(analyse(sample, 0), "some.jsonl", 0)
    assert "threshold none (gate)" in report_text
    assert "adds 0.50 of 0.70 runs" in report_text
    assert not re.search("closest call|one trace in ten", report_text)
    assert "closest call" in text(analyse([*sample, decision()], 0), "some.jsonl", 0)


def test_tasks_are_counted_by_how_their_runs_end(tmp_path: Path) -> None:
    ends = (("a", True), ("a", True), ("b", True), ("b", False), ("c", False), ("c", False), ("d", False))
    traces = [
        minimal_payload(trace_id=f"kp:trace:{number}", objective=objective, success=success)
        for number, (objective, success) in enumerate(ends)
    ]
    # These three traces ask for one task in different words.
    for trace in traces[-3:]:
        trace["metadata"]["task"] = "one"
    file = jsonl_file(tmp_path / "traces.jsonl", *traces)
    printed = invoked(commands, "report", file, "--text", "--set", "embedding.embedder=none").stdout
    assert "1 of 3 tasks were never solved" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert [line for line in lines if line[1:2] == ["solved"]] == [
        ["always", "solved", "1", "2"],
        ["sometimes", "solved", "1", "2"],
        ["never", "solved", "1", "3"],
    ]
    # The table has a trace of each task that is not always solved, with the task's runs and successes, the least solved first.
    assert [line for line in lines if line[1:] in (["3", "0"], ["2", "1"])] == [["4", "3", "0"], ["2", "2", "1"]]


def test_ids_are_never_cut_off() -> None:
    long = decision(f"kp:trace:producer:{'x' * 180}")
    assert "producer:" + "x" * 180 in text(analyse([long], 0), "some.jsonl", 0)


def test_page_escapes_all_content_of_traces(page_html: str) -> None:
    elements = Elements(page_html)
    assert elements.open == []
    assert [attributes.get("type") for tag, attributes in elements.tags if tag == "script"] == ["application/json", None]
    assert {tag for tag, _ in elements.tags} <= {
        *("html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "footer", "script", "a"),
        *("h1", "h2", "h3", "p", "ul", "li", "dl", "dt", "dd", "div", "span", "code", "figure", "figcaption"),
        *("details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td"),
    }
    assert not any(key.startswith("on") for _, attributes in elements.tags for key in attributes)
    headings = "".join(elements.texts["h3"])
    assert "</script><script>alert(1)</script><!--" in headings
    assert "\\u001b[2J\\u202e" in headings


def test_page_runs_its_own_script_alone_and_fetches_nothing(page_html: str) -> None:
    elements = Elements(page_html)
    charts, script = elements.texts["script"][0], "".join(elements.texts["script"][1:])
    (policy,) = [attributes["content"] for tag, attributes in elements.tags if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert fingerprint(script) in policy
    assert fingerprint("".join(elements.texts["style"])) in policy
    assert not [attributes for _, attributes in elements.tags if "src" in attributes or "style" in attributes]
    assert not re.search("[<>&]", charts)
    assert json.loads(charts).keys() == {
        attributes["id"] for _, attributes in elements.tags if attributes.get("class") == "chart"
    }


def test_page_can_be_read_without_seeing_its_charts(page_html: str) -> None:
    tags = Elements(page_html).tags
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in tags}
    for _, attributes in tags:
        if attributes.get("class") in ("chart", "scroll"):
            assert attributes["aria-label"]
            assert attributes["tabindex"] == "0"
    anchors = {attributes["href"] for tag, attributes in tags if tag == "a"}
    assert anchors <= {f"#{attributes['id']}" for _, attributes in tags if "id" in attributes}
    sections = re.findall(r"<section.*?</section>", page_html, re.DOTALL)
    assert len(sections) == 7
    assert all("<table>" in section for section in sections if 'class="chart"' in section)


def test_page_needs_the_report_extra_and_text_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    line = hostile_decisions()[1].model_dump_json()
    # The missing extra is reported before FILE is opened.
    refused = CliRunner().invoke(report, ["no-such-file.jsonl"])
    assert isinstance(refused.exception, SettingsError)
    assert "kp-scorer[report]" in str(refused.exception)
    result = invoked(report, "-", "--text", stdin=line)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "0 of 1 trace accepted" in result.stdout
