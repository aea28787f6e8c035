"""Renders the report as text for a terminal of 80 columns."""

import io
import textwrap
from collections.abc import Iterator
from typing import Final

from rich.cells import set_cell_size
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from kp_scorer.characters import escaped
from kp_scorer.report.contents import DETAILS, WORDS, Section, Table, head_of, sections_of
from kp_scorer.report.summary import Analysis

COLUMNS: Final = 80
_NAME: Final = 22
_DETAIL: Final = 36
_COLUMNS_OF_IDS: Final = frozenset({"trace", "agent", "framework", "reason"})
_LONGER_THAN_ANY_ID: Final = 400
_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"


def text(analysis: Analysis, source: str, refused: int) -> str:
    """Return a report in 80 columns on the decisions from ``source``; ``refused`` of its lines could not be read."""
    title, facts, figures = head_of(analysis, source, refused)
    in_a_row = ", ".join(f"{name} {figure}" for name, figure in figures.items())
    lines = [line for part in (title, escaped(facts), in_a_row) for line in textwrap.wrap(part, COLUMNS)]
    for section in sections_of(analysis):
        lines += ["", *_section(section)]
    return "\n".join(line.rstrip() for line in lines)


def _section(section: Section) -> Iterator[str]:
    yield from textwrap.wrap(section.heading, COLUMNS)
    yield from textwrap.wrap(section.lead, COLUMNS, initial_indent="  ", subsequent_indent="  ")
    for chart in section.charts:
        if chart.counts:
            # Round up, so that every bin with a trace has a bar.
            bars = "".join(_HEIGHTS[-(-count * (len(_HEIGHTS) - 1) // max(chart.counts))] for count in chart.counts)
            yield f"  {set_cell_size(chart.title, _NAME - 2)}{set_cell_size(chart.detail, _DETAIL)}{bars}"
    for content in section.tables:
        if content.is_in_text:
            yield set_cell_size(f"  {content.caption}", COLUMNS)
            yield from _table(content)


def _table(content: Table) -> Iterator[str]:
    """Yield a line for each row and, below it, the lines of each of its sentences."""
    headings = [heading for heading in content.headings if heading not in DETAILS]
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings):
        is_figure = number > 0 and heading not in WORDS
        width = _NAME if number == 0 and heading not in _COLUMNS_OF_IDS else None
        grid.add_column(Text(heading), justify="right" if is_figure else "left", no_wrap=True, max_width=width)
    for row in content.rows:
        grid.add_row(*map(Text, row[: len(headings)]))
    width = COLUMNS - 2 if _COLUMNS_OF_IDS.isdisjoint(headings) else _LONGER_THAN_ANY_ID
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(grid)
    lines = capture.get().splitlines()
    yield f"  {lines[0]}"
    for line, row in zip(lines[1:], content.rows, strict=True):
        yield f"  {line}"
        for detail in filter(None, row[len(headings) :]):
            # Measure the text in cells, because some characters take two.
            yield from (f"    {part.plain.rstrip()}" for part in Text(detail).wrap(console, COLUMNS - 4))
