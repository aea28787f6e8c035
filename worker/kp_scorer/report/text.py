"""The report as text for a terminal of 80 columns."""

import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import set_cell_size
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from kp_scorer.analysis.summary import Analysis
from kp_scorer.characters import escaped
from kp_scorer.report.sections import WORDS, Section, Table, facts_of, figures_of, sections_of, title_of

COLUMNS: Final = 80
_NAME: Final = 22
_DETAIL: Final = 36
_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"


def text(analysis: Analysis, source: str, refused: int) -> str:
    """An analysis of decisions from ``source``, in which so many lines were ``refused``, as lines of at most 80 columns."""
    figures = ", ".join(f"{name} {figure}" for name, figure in figures_of(analysis, refused).items())
    head = [title_of(analysis), escaped(facts_of(analysis, source)), figures]
    lines = [line for part in head for line in textwrap.wrap(part, COLUMNS)]
    for section in sections_of(analysis):
        lines += ["", *_section(section)]
    return "\n".join(set_cell_size(line, COLUMNS).rstrip() for line in lines)


def _section(section: Section) -> Iterator[str]:
    yield section.heading
    for chart in section.charts:
        if chart.counts:
            yield f"  {set_cell_size(chart.title, _NAME - 2)}{set_cell_size(chart.detail, _DETAIL)}{_spread(chart.counts)}"
    for content in section.tables:
        if content.is_in_text:
            yield f"  {content.caption}"
            yield from _table(content)


def _spread(counts: Sequence[int]) -> str:
    """A histogram on one line; where there is any trace, a bar."""
    return "".join(_HEIGHTS[-(-count * (len(_HEIGHTS) - 1) // max(counts))] for count in counts)


def _table(content: Table) -> list[str]:
    grid = Grid(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(content.headings):
        is_figure = number > 0 and heading not in WORDS
        width = None if number else _NAME
        grid.add_column(Text(heading), justify="right" if is_figure else "left", no_wrap=True, max_width=width)
    for row in content.rows:
        grid.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=COLUMNS - 2, color_system=None)
    with console.capture() as capture:
        console.print(grid)
    return [f"  {line}" for line in capture.get().splitlines()]
