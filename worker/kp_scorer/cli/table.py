"""Decisions as a table for people."""

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kp_scorer.characters import escaped
from kp_scorer.cli.words import short_id, why
from kp_scorer.decision import Decision, Outcome

_WIDE: Final = 120
_DOMAIN: Final = 40
_SHORT_DOMAIN: Final = 16
"""The longest of the built-in domains."""
_DIMENSIONS: Final = ("complex.", "novelty", "tools", "outcome")
_COLOURS: Final[dict[Outcome, str]] = {"accepted": "green", "review": "yellow", "rejected": "red"}


def decisions_table(decisions: Sequence[Decision], columns: int) -> Table:
    """One row a decision: trace, domain, dimensions, score, threshold, outcome, and why in a few words.

    In fewer than 120 columns it goes without the dimensions, of which the words speak, and without lines between columns: then
    80 are enough.
    """
    is_wide = columns >= _WIDE
    table = Table(title=None, header_style="bold", pad_edge=False)
    if not is_wide:
        table.box, table.show_edge, table.padding = SIMPLE_HEAD, False, (0, 1, 0, 0)
    table.add_column("trace", no_wrap=True)
    table.add_column("domain", no_wrap=True, max_width=_DOMAIN if is_wide else _SHORT_DOMAIN)
    for heading in (*(_DIMENSIONS if is_wide else ()), "score", "needs"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    table.add_column("why")
    for decision in decisions:
        parts = decision.dimensions
        figures = (parts.complexity, parts.novelty, parts.tool_diversity, parts.outcome_confidence) if is_wide else ()
        table.add_row(
            escape(short_id(decision.trace_id)),
            escape(escaped(decision.domain)),
            *(f"{figure:.2f}" for figure in figures),
            f"{decision.score:.3f}",
            f"{decision.threshold:g}",
            f"[{_COLOURS[decision.outcome]}]{decision.outcome}[/]",
            escape(why(decision)),
        )
    return table
