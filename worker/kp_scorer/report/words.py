"""The words and figures that sections and charts share."""

from typing import Final

from kp_scorer.analysis.summary import Analysis, DomainSummary
from kp_scorer.characters import escaped
from kp_scorer.decision import Outcome
from kp_scorer.trace import TRACE_ID_PREFIX

OUTCOME_WORDS: Final[dict[Outcome, str]] = {"accepted": "accepted", "review": "to review", "rejected": "rejected"}


def share(part: int, total: int) -> str:
    """A part of a total, in percent."""
    if not part or not total:
        return "0%"
    percent = 100 * part / total
    if percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if percent < 9.95 or 99 < percent < 100 else f"{percent:.0f}%"


def accepted_words(summary: DomainSummary) -> str:
    """How many traces there are, how many of them were accepted, and what share that is."""
    accepted, count = summary.outcomes["accepted"], len(summary.decisions)
    return f"{plural(count, 'trace')}, {accepted:,} accepted ({share(accepted, count)})"


def plural(count: int, singular: str, many: str = "") -> str:
    """A count and what is counted."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def spaced(name: str) -> str:
    """The name of a field, an override or a reason as words."""
    return escaped(name.replace("_", " "))


def shown_id(trace_id: str) -> str:
    """A trace id without the prefix that all have."""
    return escaped(trace_id.removeprefix(TRACE_ID_PREFIX))


def named(domain: str) -> str:
    """What to call a domain."""
    return escaped(domain) or "(no name)"


def with_total(analysis: Analysis) -> list[tuple[str, DomainSummary]]:
    """All together, then each domain, or the smaller ones together, each with what to call it."""
    domains = [(f"{each.smaller:,} other domains" if each.smaller else named(each.name), each) for each in analysis.domains]
    return [("all", analysis.total), *domains]


def threshold_words(summary: DomainSummary) -> str:
    """The threshold that applied, and whether another one did to some traces."""
    others = f" (for {summary.other_thresholds:,}, another one)" if summary.other_thresholds else ""
    return f"{summary.threshold:g}{others}"


def near_duplicate_words(analysis: Analysis) -> str:
    """How many traces repeat others, and in how many groups."""
    count = sum(map(len, analysis.groups))
    return f"{plural(count, 'trace')} in {plural(len(analysis.groups), 'group')}" if count else "none"
