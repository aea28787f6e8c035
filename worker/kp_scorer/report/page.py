"""Renders the report as one page that needs no network and no other file."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from importlib import resources
from importlib.util import find_spec
from string import Template
from typing import Any

from kp_scorer.characters import escaped_lines
from kp_scorer.errors import SettingsError
from kp_scorer.report.contents import DETAILS, Chart, Objectives, Section, Table, head_of, sections_of
from kp_scorer.report.phrases import OUTCOME_WORDS
from kp_scorer.report.summary import Analysis


class Html(str):
    """HTML that is used as it is. Any other text is escaped when it is put into an element."""

    __slots__ = ()


def check_installed() -> None:
    """Raise SettingsError if the package that contains Vega is not installed."""
    if find_spec("vl_convert") is None:
        raise SettingsError("report: the page's charts need vl-convert-python: install kp-scorer[report], or take --text")


def page(
    analysis: Analysis, source: str, refused: int, objectives: Objectives, points: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the page for an analysis of decisions from ``source``, which had ``refused`` lines that could not be read."""
    script, style = _drawing_script(), _asset("page.css")
    sections = sections_of(analysis, objectives, points)
    content = "the beginnings of traces" if points else "objectives of traces, but nothing else of their content"
    title, facts, figures = head_of(analysis, source, refused)
    names = {section.anchor: section.anchor.replace("-", " ").capitalize() for section in sections}
    # The policy of the page allows no fetch, and no script but this one, whatever a trace brings onto the page.
    return Template(_asset("page.html")).substitute(
        script_hash=fingerprint(script),
        style_hash=fingerprint(style),
        title=_text(title),
        style=style,
        facts=_text(facts),
        figures="".join(element("div", element("dt", name), element("dd", figure)) for name, figure in figures.items()),
        contents="".join(element("li", element("a", name, href=f"#{anchor}")) for anchor, name in names.items()),
        sections="".join(map(_section, sections)),
        content=content if objectives or points else "no trace's content",
        charts=_json({chart.chart_id: {"kind": chart.kind, **chart.figures} for each in sections for chart in each.charts}),
        script=script,
    )


def fingerprint(content: str) -> str:
    """Return the name by which a Content-Security-Policy allows a script or a style with this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _drawing_script() -> str:
    """Return Vega with ``page.js`` as the text of a script. Bundling takes seconds."""
    # Imported here, because all else must work without it.
    import vl_convert

    bundle = vl_convert.javascript_bundle(_asset("page.js"))
    # A string in the script might end the script, or begin a comment of HTML.
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r", "")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _section(section: Section) -> Html:
    label, swatch = f"{section.anchor}-heading", partial(element, "span", aria_hidden="true")
    parts = [element("h2", section.heading, id=label), element("p", section.lead, class_="lead")]
    if section.legend:
        outcomes = (element("li", swatch(class_=f"swatch {each}"), OUTCOME_WORDS[each]) for each in section.legend)
        parts.append(element("ul", *outcomes, class_="legend"))
    if section.charts:
        columns = "narrow" if len(section.charts) > 1 or section.charts[0].counts else "wide"
        parts.append(element("div", *map(_figure, section.charts), class_=f"grid {columns}"))
    return element("section", *parts, *map(_table, section.tables), id=section.anchor, aria_labelledby=label)


def _figure(chart: Chart) -> Html:
    caption = element("figcaption", element("h3", chart.title), element("p", chart.detail))
    description = f"{chart.title}: {chart.detail}; the tables below have its figures"
    place = element("div", class_="chart", id=chart.chart_id, role="img", tabindex="0", aria_label=description)
    return element("figure", caption, place, element("div", class_="clicked", aria_live="polite"))


def _table(content: Table) -> Html:
    headings, caption = content.headings, content.caption
    classes = {"trace": "id", "label": "", **dict.fromkeys(DETAILS, "sentence"), headings[0]: ""}
    kinds = [classes.get(heading, "figure") for heading in headings]
    columns = (element("th", heading, scope="col", class_=kind) for heading, kind in zip(headings, kinds, strict=True))
    lines = []
    for first, *others in content.rows:
        cells = (element("td", cell, class_=kind) for cell, kind in zip(others, kinds[1:], strict=True))
        lines.append(element("tr", element("th", first, scope="row"), *cells))
    parts = (element("caption", caption), element("thead", element("tr", *columns)), element("tbody", *lines))
    html = element("div", element("table", *parts), class_="scroll", tabindex="0", role="region", aria_label=caption)
    return html if content.is_open else element("details", element("summary", caption), html)


def element(name: str, /, *children: str, **attributes: str) -> Html:
    """Return an element. In the name of an attribute, an underscore stands for a hyphen; one at the end is dropped."""
    pairs = "".join(f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{pairs}>{''.join(map(_text, children))}</{name}>")


def _text(content: str) -> Html:
    """Return HTML as it is, and a text with everything escaped that HTML, or a terminal that shows it, would act on."""
    return content if isinstance(content, Html) else Html(escape(escaped_lines(content)))


def _json(data: dict[str, Any]) -> str:
    """Return JSON for a script. No text in it can end the script, or begin a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
