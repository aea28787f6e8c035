"""Short phrases about a decision."""

from collections.abc import Iterator
from typing import Final

from kp_scorer.characters import escaped
from kp_scorer.decision import Decision, Outcome, Override
from kp_scorer.trace import TRACE_ID_PREFIX

OUTCOME_WORDS: Final[dict[Outcome, str]] = {"accepted": "accepted", "review": "to review", "rejected": "rejected"}
OVERRIDE_WORDS: Final[dict[Override, str]] = {
    "single_thought": "a single thought (score 0.1)",
    "recovered_from_errors": "recovered from errors (+0.1)",
    "single_tool": "only one tool (-0.1)",
}
_LOW: Final = 0.5
_HIGH: Final = 0.8
_FEWEST_SHARED: Final = 10
CLOSE: Final = 0.6


def shortened(text: str, most_chars: int = 160) -> str:
    """Return the beginning of a text on one line, of at most ``most_chars`` characters."""
    words = " ".join(text[: 10 * most_chars].split())
    return words if len(words) <= most_chars else words[: most_chars - 1].rstrip() + "…"


def plural(count: int, singular: str, many: str = "") -> str:
    """Return a count with the noun that it counts."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def percent(part: int, total: int) -> str:
    """Return a share in percents, with a digit behind the point where that is much of it."""
    if not part or not total:
        return "0%"
    share = 100 * part / total
    if share < 0.1:
        return "<0.1%"
    return f"{share:.1f}%" if share < 9.95 or 99 < share < 100 else f"{share:.0f}%"


def bracketed(part: int, total: int) -> str:
    """Return a space and a share in brackets; nothing for a total below ten, where a share means little."""
    return f" ({percent(part, total)})" if total >= _FEWEST_SHARED else ""


def spaced(name: str) -> str:
    """Return the name of a field, an override or a reason as words."""
    return escaped(name.replace("_", " "))


def shown_id(trace_id: str) -> str:
    """Return a trace id without the prefix that all ids have."""
    return escaped(trace_id.removeprefix(TRACE_ID_PREFIX))


def short_id(trace_id: str) -> str:
    """Return the beginning of a trace id without its namespaces, which distinguishes the traces of a table."""
    return trace_id.rpartition(":")[2][:8]


def why(decision: Decision) -> str:
    """Return the main reasons of a decision: guards, checks, overrides, a similar earlier trace, high or low dimensions."""
    phrases = [reason for kind, reason in reasons(decision) if not kind.startswith(("high", "low"))]
    levels = [name for kind, name in reasons(decision) if kind.startswith(("high", "low"))]
    level = "high" if decision.outcome == "accepted" else "low"
    if levels:
        phrases.append(f"{level} {', '.join(levels)}")
    return ", ".join(phrases) or f"no dimension is {level}"


def reasons(decision: Decision) -> Iterator[tuple[str, str]]:
    """Yield each reason: its kind, and its words, which for a high or low dimension are its name alone."""
    yield from ((f"guard {guard.name}",) * 2 for guard in decision.guards if guard.rejects)
    yield from ((f"check {check.name}",) * 2 for check in decision.checks if check.outcome)
    yield from ((f"pinned set {each.name}",) * 2 for each in decision.pinned if each.outcome)
    if decision.gate and not decision.is_guarded:
        adds = f"adds {decision.gate.adds:.2f} of {decision.gate.bar:.2f} runs"
        yield "gate", adds if decision.gate.eligible else "does not meet the requirement"
    fired = [override.name for override in decision.overrides]
    yield from ((words, words) for name, words in OVERRIDE_WORDS.items() if name in fired)
    nearest, is_accepted = decision.novelty.nearest, decision.outcome == "accepted"
    if decision.novelty.duplicate_of and not is_accepted:
        yield "repeats an earlier trace", f"repeats {short_id(decision.novelty.duplicate_of)}"
    elif nearest and nearest.similarity >= CLOSE and not is_accepted:
        words = f"close to {short_id(nearest.trace_id)} ({nearest.similarity:.2f})"
        yield f"close to an earlier trace (similar by {CLOSE:g} or more)", words
    for name, (_, value) in zip(("complexity", "novelty", "tools", "outcome"), decision.dimensions, strict=True):
        if is_accepted and value >= _HIGH:
            yield f"high {name} ({_HIGH:g} or more)", name
        elif not is_accepted and value < _LOW:
            yield f"low {name} (less than {_LOW:g})", name
