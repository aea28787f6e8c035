"""Renders the report as one page that needs no network and no other file."""

import base64
import hashlib
from importlib import resources
from importlib.util import find_spec
from typing import Any

from kp_scorer.characters import escaped_lines
from kp_scorer.errors import SettingsError
from kp_scorer.report.contents import DETAILS, head_of, sections_of
from kp_scorer.report.phrases import OUTCOME_WORDS
from kp_scorer.report.summary import Analysis


def check_installed() -> None:
    """Raise SettingsError if a package that draws the page is not installed."""
    for module in ("jinja2", "vl_convert"):
        if find_spec(module) is None:
            raise SettingsError(f"report: there is no {module}: install kp-scorer[report], or take --text")


def page(analysis: Analysis, source: str, refused: int) -> str:
    """Return the page for an analysis of decisions from ``source``, which had ``refused`` lines that could not be read."""
    # Import these here, because everything but the page must work without them.
    import vl_convert
    from jinja2 import Environment, StrictUndefined

    def escaped_text(value: Any) -> Any:
        # Jinja escapes the characters that HTML acts on; this escapes those that a terminal acts on.
        return value if hasattr(value, "__html__") else escaped_lines(str(value))

    # Bundling Vega and ``page.js`` takes seconds.
    script, style = vl_convert.javascript_bundle(_asset("page.js")), _asset("page.css")
    # Otherwise a string in the script could end the script, or begin an HTML comment.
    script = script.replace("</script", "<\\/script").replace("<!--", "<\\!--").replace("\r", "")
    sections = sections_of(analysis)
    content = "objectives of traces, but nothing else of their content" if analysis.objectives else "no trace's content"
    title, facts, figures = head_of(analysis, source, refused)
    environment = Environment(
        autoescape=True, finalize=escaped_text, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    # The policy of the page allows no fetch, and no script but this one, whatever a trace brings onto the page.
    return environment.from_string(_asset("page.html")).render(
        script_hash=fingerprint(script),
        style_hash=fingerprint(style),
        title=title,
        style=style,
        facts=facts,
        figures=figures,
        sections=sections,
        classes={"trace": "id", "label": "", **dict.fromkeys(DETAILS, "sentence")},
        outcome_words=OUTCOME_WORDS,
        content="the beginnings of traces" if analysis.points else content,
        charts={chart.chart_id: {"kind": chart.kind, **chart.figures} for each in sections for chart in each.charts},
        script=script,
    )


def fingerprint(content: str) -> str:
    """Return the name by which a Content-Security-Policy allows a script or a style with this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
