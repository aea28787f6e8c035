"""What the sections of the page are made of: figures, tables, and what folds them away."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from kp_scorer.report.charts import Spec
from kp_scorer.report.markup import Html, element


class Section(NamedTuple):
    """A part of the page, with a heading that says what it shows."""

    anchor: str
    """Its id on the page, with which those of its charts begin."""
    label: str
    """What the list of sections calls it."""
    heading: str
    body: Html
    charts: Mapping[str, Spec]
    """The charts to draw, by the id of the element that they go to."""

    def html(self) -> Html:
        """The section as it stands on the page."""
        heading = element("h2", self.heading, id=f"{self.anchor}-heading")
        return element("section", heading, self.body, id=self.anchor, aria_labelledby=f"{self.anchor}-heading")


def figure(chart_id: str, title: str, detail: str, says: str) -> Html:
    """A place for a chart, with its title and a detail; ``says`` tells those who do not see it what it shows."""
    caption = element("figcaption", element("h3", title), element("p", detail))
    place = element("div", class_="chart", id=chart_id, role="img", tabindex="0", aria_label=says)
    return element("figure", caption, place)


def grid(figures: Sequence[Html], columns: str) -> Html:
    """Figures side by side, as many as there is room for: ``wide`` ones or ``narrow`` ones."""
    return element("div", *figures, class_=f"grid {columns}")


def lead(*parts: str) -> Html:
    """What comes first in a section: how to read it."""
    return element("p", *parts, class_="lead")


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str] = ()) -> Html:
    """A table that scrolls within itself. Its first column has what a row is about; others hold figures, or ``words``."""
    kinds = [{} if heading in (headings[0], *words) else {"class_": "figure"} for heading in headings]
    columns = (element("th", heading, scope="col", **kind) for heading, kind in zip(headings, kinds, strict=True))
    lines = (
        element(
            "tr",
            element("th", row[0], scope="row"),
            *(element("td", cell, **kind) for cell, kind in zip(row[1:], kinds[1:], strict=True)),
        )
        for row in rows
    )
    parts = (element("caption", caption), element("thead", element("tr", *columns)), element("tbody", *lines))
    return element("div", element("table", *parts), class_="scroll", tabindex="0", role="region", aria_label=caption)


def folded(summary: str, *content: str) -> Html:
    """Content that is shown when one asks for it."""
    return element("details", element("summary", summary), *content)
