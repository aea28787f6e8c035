"""The words and figures that the page and the text share."""

from collections.abc import Sequence
from typing import Final

from kp_scorer.analysis.domains import Domain
from kp_scorer.analysis.whole import Analysis, OfDomain
from kp_scorer.characters import escaped
from kp_scorer.decision import Outcome
from kp_scorer.trace import TRACE_ID_PREFIX

SHARES: Final = (0.01, 0.05, 0.1, 0.25, 0.5)
"""The shares of traces for which a threshold is named."""
STAGE_WORDS: Final = {"look_up_ms": "look up", "embed_ms": "embed", "place_ms": "place in the log"}
OUTCOME_WORDS: Final[dict[Outcome, str]] = {"accepted": "accepted", "review": "to review", "rejected": "rejected"}


def share(part: int, whole: int) -> str:
    """A part of a whole, in percent."""
    if not part or not whole:
        return "0%"
    percent = 100 * part / whole
    if percent < 0.1:
        return "<0.1%"
    return f"{percent:.1f}%" if percent < 9.95 or 99 < percent < 100 else f"{percent:.0f}%"


def plural(count: int, one: str, many: str = "") -> str:
    """A count and what is counted."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def spaced(name: str) -> str:
    """The name of a field, an override or a reason as words."""
    return escaped(name.replace("_", " "))


def shown_id(trace_id: str) -> str:
    """A trace id without the prefix that all have."""
    return escaped(trace_id.removeprefix(TRACE_ID_PREFIX))


def named(domain: str) -> str:
    """What to call a domain."""
    return escaped(domain) or "(no name)"


def duration(seconds: int) -> str:
    """A time in its largest unit."""
    for unit, size in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size or seconds == size:
            return plural(round(seconds / size), unit)
    return plural(seconds, "second")


def domain_names(domains: Sequence[Domain]) -> list[str]:
    """What to call domains, each by another name."""
    names: list[str] = []
    for domain in domains:
        name = f"{domain.smaller:,} other domains" if domain.smaller else named(domain.name)
        while name in names:
            name += "'"
        names.append(name)
    return names


def outcomes_in(of: OfDomain) -> list[Outcome]:
    """The outcomes that are worth a word: accepted and rejected always, review where there was any."""
    return [outcome for outcome, count in of.scores.outcomes.items() if count or outcome != "review"]


def headline(analysis: Analysis) -> str:
    """How many traces were accepted."""
    total = analysis.total
    accepted, count = total.scores.outcomes["accepted"], len(total.domain.decisions)
    return f"{accepted:,} of {plural(count, 'trace')} accepted ({share(accepted, count)})"


def threshold_words(of: OfDomain) -> str:
    """The threshold that traces met, and whether some met another one."""
    scores = of.scores
    return f"{scores.threshold:g}" + (f" (for {scores.other_thresholds:,}, another one)" if scores.other_thresholds else "")


def near_duplicate_words(analysis: Analysis) -> str:
    """How many traces repeat others, and in how many groups."""
    count = sum(len(group.members) for group in analysis.groups)
    return f"{plural(count, 'trace')} in {plural(len(analysis.groups), 'group')}" if count else "none"
