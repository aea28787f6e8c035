"""Decisions as a table for people."""

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kp_scorer.characters import escaped
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


def short_id(trace_id: str) -> str:
    """The first part of a trace id, enough to tell the traces of a table apart."""
    return trace_id.removeprefix("kp:trace:")[:8]


def why(decision: Decision) -> str:
    """What weighed most, in a few words."""
    fired = [override.name for override in decision.overrides]
    reasons = [words for name, words in OVERRIDE_WORDS.items() if name in fired]
    reasons += _strengths(decision) if decision.outcome == "accepted" else _weaknesses(decision)
    return ", ".join(reasons[:3]) or (
        "just enough of everything" if decision.outcome == "accepted" else "a little short everywhere"
    )


OVERRIDE_WORDS = {
    "single_thought": "a single thought (score 0.1)",
    "recovered_from_errors": "recovered from errors (+0.1)",
    "single_tool": "only one tool (-0.1)",
}


def _strengths(decision: Decision) -> list[str]:
    parts = decision.dimensions
    return [
        words
        for holds, words in (
            (parts.novelty >= 0.7, "new"),
            (parts.complexity >= 0.8, "rich steps"),
            (parts.tool_diversity >= 0.9, "varied tools"),
            (parts.outcome_confidence >= 0.85, "confident success"),
        )
        if holds
    ]


def _weaknesses(decision: Decision) -> list[str]:
    parts, nearest = decision.dimensions, decision.novelty.nearest
    known = ""
    if decision.novelty.duplicate_of:
        known = f"repeats {short_id(decision.novelty.duplicate_of)}"
    elif nearest and nearest.similarity >= 0.6:
        known = f"close to {short_id(nearest.trace_id)} ({nearest.similarity:.2f})"
    return [
        words
        for holds, words in (
            (bool(known), known),
            # After a failure confidence is multiplied by 0.3, so a failed trace cannot have more.
            (parts.outcome_confidence <= 0.3, "failed or doubtful"),
            (0.3 < parts.outcome_confidence < 0.75, "unsure outcome"),
            (parts.complexity < 0.5, "simple steps"),
            (parts.tool_diversity == 0.0, "no tools"),
        )
        if holds
    ]
