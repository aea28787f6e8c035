"""The report as text and as a page shows what it is about, and nothing that a trace brought along acts."""

import json
import re
import sys
from html.parser import HTMLParser
from typing import Final

import pytest
from click.testing import CliRunner
from hypothesis import given
from kp_scorer.analysis.whole import analyse
from kp_scorer.characters import acts
from kp_scorer.cli.report import report
from kp_scorer.decision import Decision
from kp_scorer.errors import SettingsError
from kp_scorer.report.library import fingerprint
from kp_scorer.report.markup import Html, element
from kp_scorer.report.page import page
from kp_scorer.report.text import COLUMNS, text
from kp_scorer.report.words import duration, share
from kp_scorer.scoring import Policy
from rich.cells import cell_len

from tests.support.decisions import decision, decisions

HOSTILE: Final = "</script><script>alert(1)</script><!--\"'&\x1b[2J\u202e\n{{}}"
LETTERS: Final = {"malformed": 2, "poison": 1}


def hostile_decisions() -> list[Decision]:
    """Decisions that say so wherever they can."""
    return [
        decision(f"kp:trace:{HOSTILE}", domain=HOSTILE, score=0.76, nearest=(HOSTILE, 0.99)),
        decision("kp:trace:1", domain="\u5ba2\u6236\u670d\u52d9" * 10, duplicate_of=HOSTILE, overrides=("single_tool",)),
    ]


class Elements(HTMLParser):
    """The elements of a page, and the texts in them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)


@pytest.fixture(scope="module")
def whole_page() -> str:
    """A page with all that a page can have."""
    return page(analyse(hostile_decisions(), LETTERS, Policy(threshold=0.4)), HOSTILE, 3)


@given(decisions())
def test_text_fits_a_terminal_and_shows_nothing_that_acts(found: list[Decision]) -> None:
    for line in text(analyse(found, LETTERS, Policy(threshold=0.4)), "some.jsonl", 1).split("\n"):
        assert cell_len(line) <= COLUMNS
        assert not acts(line)


def test_text_names_what_matters() -> None:
    scores = [number / 100 for number in range(100)]
    found = [decision(f"kp:trace:{score}", score=score, domain="code" if score < 0.9 else HOSTILE) for score in scores]
    shown = text(analyse([*found, *hostile_decisions()], LETTERS, None), "some.jsonl", 2)
    lines = shown.split("\n")
    assert lines[:2] == ["26 of 102 traces accepted (25%)", "from some.jsonl, 2 lines refused"]
    assert any(re.match(r"all +\d.*0\.90", line) for line in lines)
    assert any("accept 10%" in line for line in lines)
    assert "near duplicates: 3 traces in 1 group" in lines
    assert "dead letters: 3" in lines
    assert any(re.match(r"single tool +1 ", line) for line in lines)
    assert "shadow" not in shown


def test_page_takes_nothing_that_a_trace_says_for_its_own(whole_page: str) -> None:
    elements = Elements(whole_page)
    assert elements.open == []
    assert [attributes.get("type") for tag, attributes in elements.seen if tag == "script"] == ["application/json", None]
    assert {tag for tag, _ in elements.seen} <= {
        *("html", "head", "meta", "title", "style", "body", "header", "nav", "main", "section", "footer", "script", "a"),
        *("h1", "h2", "h3", "p", "ul", "li", "dl", "dt", "dd", "div", "span", "code", "figure", "figcaption"),
        *("details", "summary", "table", "caption", "thead", "tbody", "tr", "th", "td"),
    }
    assert not any(key.startswith("on") for _, attributes in elements.seen for key in attributes)
    shown = "".join(elements.texts["h3"])
    assert "</script><script>alert(1)</script><!--" in shown
    assert "\\u001b[2J\\u202e" in shown


def test_page_runs_its_own_script_alone_and_fetches_nothing(whole_page: str) -> None:
    elements = Elements(whole_page)
    charts, script = elements.texts["script"][0], "".join(elements.texts["script"][1:])
    (policy,) = [attributes["content"] for tag, attributes in elements.seen if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert fingerprint(script) in policy
    assert fingerprint("".join(elements.texts["style"])) in policy
    assert not [attributes for _, attributes in elements.seen if "src" in attributes or "style" in attributes]
    assert not re.search("[<>&]", charts)
    assert json.loads(charts)["charts"].keys() == {
        attributes["id"] for _, attributes in elements.seen if attributes.get("class") == "chart"
    }


def test_page_can_be_read_without_seeing_its_charts(whole_page: str) -> None:
    seen = Elements(whole_page).seen
    assert {"header", "nav", "main", "footer"} <= {tag for tag, _ in seen}
    for _, attributes in seen:
        if attributes.get("class") in ("chart", "scroll"):
            assert attributes["aria-label"]
            assert attributes["tabindex"] == "0"
    anchors = {attributes["href"] for tag, attributes in seen if tag == "a"}
    assert anchors <= {f"#{attributes['id']}" for _, attributes in seen if "id" in attributes}
    sections = re.findall(r"<section.*?</section>", whole_page, re.DOTALL)
    assert len(sections) == 10
    assert all("<table>" in section for section in sections if 'class="chart"' in section)


def test_a_page_needs_its_extra_and_text_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    given = hostile_decisions()[1].model_dump_json()
    # Before FILE is looked at.
    refused = CliRunner().invoke(report, ["no-such-file.jsonl"])
    assert isinstance(refused.exception, SettingsError)
    assert "kp-scorer[report]" in str(refused.exception)
    shown = CliRunner().invoke(report, ["-", "--text"], input=given)
    assert shown.exit_code == 0
    assert shown.stdout == ""
    assert "0 of 1 trace accepted" in shown.stderr


def test_a_report_on_what_is_left_of_a_file_says_so_and_exits_1() -> None:
    shown = CliRunner().invoke(report, ["-", "--text"], input=f"{hostile_decisions()[1].model_dump_json()}\n[]\n")
    assert shown.exit_code == 1
    assert "from -, 1 line refused" in shown.stderr


def test_nothing_is_reported_of_nothing() -> None:
    found = CliRunner().invoke(report, ["-", "--text"], input="")
    assert found.exit_code == 1
    assert "no decisions" in str(found.exception)


def test_a_page_that_cannot_be_written_is_a_wrong_option(whole_page: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    missing = tmp_path_factory.mktemp("report") / "no" / "report.html"
    found = CliRunner().invoke(report, ["-", "--output", str(missing)], input=hostile_decisions()[1].model_dump_json())
    assert found.exit_code == 2
    assert "--output" in found.stderr


def test_elements_escape_texts_and_take_html_as_it_is() -> None:
    inner = element("code", 'a<b>&"')
    assert element("td", inner, " & ", class_="x", aria_label='"') == (
        '<td class="x" aria-label="&quot;"><code>a&lt;b&gt;&amp;&quot;</code> &amp; </td>'
    )
    assert isinstance(inner, Html)


@pytest.mark.parametrize(
    ("part", "whole", "said"),
    [(0, 5, "0%"), (5, 5, "100%"), (1, 2_000, "<0.1%"), (1, 80, "1.2%"), (1, 2, "50%"), (999, 1_000, "99.9%"), (0, 0, "0%")],
)
def test_shares_are_said_in_few_digits(part: int, whole: int, said: str) -> None:
    assert share(part, whole) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1, "1 second"), (90, "90 seconds"), (60, "1 minute"), (900, "15 minutes"), (3_600, "1 hour"), (604_800, "7 days")],
)
def test_durations_are_said_in_their_largest_unit(seconds: int, said: str) -> None:
    assert duration(seconds) == said
