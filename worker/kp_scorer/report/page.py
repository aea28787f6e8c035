"""The report as one page that needs nothing else: no network, no other file."""

import json
from importlib import resources
from typing import Any

from kp_scorer.analysis.tempo import moment
from kp_scorer.analysis.whole import Analysis
from kp_scorer.report.charts import CONFIG
from kp_scorer.report.course_sections import novelty_section, tempo_section
from kp_scorer.report.library import drawing_script, fingerprint
from kp_scorer.report.markup import Html, element
from kp_scorer.report.parts import parts
from kp_scorer.report.score_sections import dimensions_section, overrides_section, scores_section, thresholds_section
from kp_scorer.report.sections import Section
from kp_scorer.report.trace_sections import closest_section, flips_section, letters_section, near_duplicates_section
from kp_scorer.report.words import OUTCOME_WORDS, headline, near_duplicate_words, outcomes_in, share, threshold_words


def page(analysis: Analysis, source: str, refused: int) -> str:
    """The page for an analysis of decisions from ``source``, in which so many lines were ``refused``.

    Raises:
        SettingsError: what draws the charts is not installed.
    """
    script = drawing_script()
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    sections = _sections(analysis)
    # Nothing may be fetched, and nothing runs but this one script, whatever a trace brought onto the page.
    policy = f"default-src 'none'; script-src {fingerprint(script)}; style-src {fingerprint(style)}; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{headline(analysis)} - kp-scorer report"),
        element("style", Html(style)),
    )
    charts = {chart_id: spec for section in sections for chart_id, spec in section.charts.items()}
    body = element(
        "body",
        element("a", "Skip to the report", class_="skip", href="#main"),
        _header(analysis, source, refused),
        _contents(sections),
        element("main", *(section.html() for section in sections), id="main"),
        element("footer", element("p", "Made by kp-scorer report. It holds ids, domains and figures, and no trace's content.")),
        element("script", _json({"config": CONFIG, "charts": charts}), type="application/json", id="charts"),
        element("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _sections(analysis: Analysis) -> list[Section]:
    always = (
        scores_section,
        thresholds_section,
        closest_section,
        dimensions_section,
        overrides_section,
        novelty_section,
        near_duplicates_section,
    )
    return list(parts(analysis, always, flips=flips_section, letters=letters_section, tempo=tempo_section))


def _header(analysis: Analysis, source: str, refused: int) -> Html:
    total, count = analysis.total, len(analysis.total.domain.decisions)
    facts = [source]
    if analysis.throughput:
        start, spans, width = analysis.throughput.start_s, len(analysis.throughput.counts), analysis.throughput.width_s
        days = [f"{moment(each):%Y-%m-%d}" for each in (start, start + spans * width)]
        facts.append(f"decided {' to '.join(dict.fromkeys(days))}")
    facts.append(f"threshold {threshold_words(total)}")
    figures = {
        OUTCOME_WORDS[outcome]: f"{total.scores.outcomes[outcome]:,} ({share(total.scores.outcomes[outcome], count)})"
        for outcome in outcomes_in(total)
    }
    figures |= {"median score": f"{total.scores.quantiles.p50:.2f}", "near duplicates": near_duplicate_words(analysis)}
    if analysis.letters:
        figures["dead letters"] = f"{sum(analysis.letters.values()):,}"
    if refused:
        figures["lines refused"] = f"{refused:,}"
    shown = (element("div", element("dt", name), element("dd", figure)) for name, figure in figures.items())
    return element(
        "header",
        element("h1", headline(analysis)),
        element("p", " · ".join(facts), class_="source"),
        element("dl", *shown),
    )


def _contents(sections: list[Section]) -> Html:
    links = (element("li", element("a", section.label, href=f"#{section.anchor}")) for section in sections)
    return element("nav", element("ul", *links), aria_label="Sections")


def _json(data: dict[str, Any]) -> Html:
    """JSON to stand in a script: no text in it can end that, or begin a comment."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
