"""Suggested thresholds as tables for people, of 80 columns at most."""

from rich.markup import escape
from rich.table import Table

from kp_scorer.analysis.calibration import Calibration, Cohort
from kp_scorer.analysis.suggestion import Share
from kp_scorer.characters import escaped
from kp_scorer.cli.figures import interval, percent
from kp_scorer.cli.thresholds_file import Thresholds

REST = "(all others)"
"""How the table calls what has no threshold of its own; the brackets tell it from a domain."""

_DOMAIN_COLUMNS = 16
_LACKS = {"too_few": "too few", "out_of_reach": "none has it"}


def suggestions_table(found: Calibration, thresholds: Thresholds, *, has_labels: bool) -> Table:
    """One row a domain, and one for the rest: traces, threshold, and what it accepts, each with its interval."""
    table = _table("traces", "needs", "95%", *_share_headings(has_labels=has_labels))
    for domain, cohort in found.domains.items():
        table.add_row(_shown(domain), *_suggested(cohort, thresholds.of(domain), has_labels=has_labels))
    table.add_section()
    table.add_row(REST, *_suggested(found.rest, thresholds.default, has_labels=has_labels))
    return table


def held_back_table(found: Calibration, *, has_labels: bool) -> Table:
    """One row for each threshold that was tried on traces that were held back: how many, and what it accepted of them."""
    table = _table("traces", *_share_headings(has_labels=has_labels))
    for name, cohort in [*((_shown(domain), cohort) for domain, cohort in found.domains.items()), (REST, found.rest)]:
        if held := cohort.held_back:
            shares = [held.accepted, held.precision] if has_labels else [held.accepted]
            table.add_row(name, str(held.traces), *(cell for share in shares for cell in _cells(share)))
    return table


def _table(*headings: str) -> Table:
    table = Table(header_style="bold", pad_edge=False, box=None, padding=(0, 1))
    table.add_column("domain", no_wrap=True, max_width=_DOMAIN_COLUMNS)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _share_headings(*, has_labels: bool) -> list[str]:
    return ["accept", "95%", "good", "95%"] if has_labels else ["accept", "95%"]


def _suggested(cohort: Cohort, threshold: float, *, has_labels: bool) -> list[str]:
    cells = [str(cohort.traces), f"{threshold:g}"]
    if not cohort.suggestion:
        assert cohort.lack
        return [*cells, _LACKS[cohort.lack]]
    found = cohort.suggestion
    shares = [found.accepted, found.precision] if has_labels else [found.accepted]
    return [*cells, f"{found.low:.3f}-{found.high:.3f}", *(cell for share in shares for cell in _cells(share))]


def _cells(share: Share | None) -> tuple[str, str]:
    return (percent(share.value), interval(share)) if share else ("", "")


def _shown(domain: str) -> str:
    return escape(escaped(domain))
